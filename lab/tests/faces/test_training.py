"""FaceNet: mining against a plain miner, the paper's networks by count, and training end to end."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from face_files import write_people
from linattn.cli import main
from linattn_lab.faces import images
from linattn_lab.faces.embedder import Embedder, harmonic_whitening_of, whitening_of
from linattn_lab.faces.networks import KINDS, NetworkSpec, build
from linattn_lab.faces.training import mining
from linattn_lab.faces.training.augmentation import Augmentation, augment
from linattn_lab.faces.training.recipe import Recipe, train
from linattn_lab.faces.verification import metrics as evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


def unit_vectors(count, dim, seed=0):
    return normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.double), dim=-1)


def plain_miner(vectors, labels, kind, margin):
    """Every triplet, one by one."""
    found = set()
    for a in range(len(labels)):
        others = [n for n in range(len(labels)) if labels[n] != labels[a]]
        distance = [float((vectors[a] - v).square().sum()) for v in vectors]
        for p in range(len(labels)):
            if p == a or labels[p] != labels[a]:
                continue
            for n in others:
                gap = distance[n] - distance[p]
                chosen = {
                    "semihard": gap > 0
                    and distance[n] == min(distance[m] for m in others if distance[m] > distance[p]),
                    "semihard-all": 0 < gap <= margin,
                    "all": gap <= margin,
                    "hard": distance[n] == min(distance[m] for m in others),
                }
                if chosen[kind]:
                    found.add((a, p, n))
    return found


@pytest.mark.parametrize("kind", ["semihard", "semihard-all", "hard", "all"])
@pytest.mark.parametrize("margin", [0.2, 0.7])
def test_miners_find_what_the_plain_one_finds(kind, margin):
    vectors, labels = unit_vectors(14, 4), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 0])
    loss = mining.TripletLoss(kind, margin)
    found = list(zip(*(part.tolist() for part in loss.mine(vectors, labels))))
    assert len(found) == len(set(found)) > 0
    assert set(found) == plain_miner(vectors, labels, kind, margin)
    squared = torch.cdist(vectors, vectors).square()
    losses = [float(squared[a, p] - squared[a, n] + margin) for a, p, n in found]
    counted = [max(x, 0) for x in losses if x > 0 or kind == "semihard"]
    assert float(loss(vectors, labels)) == pytest.approx(sum(counted) / len(counted), rel=1e-6)


def test_triplets_by_lot_count_those_without_a_loss_too():
    labels = torch.arange(6).repeat_interleave(4)
    apart = torch.eye(6)[labels]  # all triplets are right by more than the margin, except one person's
    apart[:4] = torch.nn.functional.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), dim=-1)
    torch.manual_seed(0)
    every = mining.TripletLoss("random")(apart, labels)
    torch.manual_seed(0)
    violating = mining.TripletLoss("random-violating")(apart, labels)
    assert 0 < every < 0.8 * violating


def test_random_triplets_are_triplets():
    labels = torch.arange(6).repeat_interleave(4)
    a, p, n = mining.TripletLoss("random").mine(unit_vectors(24, 4), labels)
    assert len(a) == 24 * 3
    assert bool((labels[a] == labels[p]).all() and (a != p).all() and (labels[a] != labels[n]).all())
    with pytest.raises(ValueError, match="no mining 'easy': there are semihard, semihard-all, hard"):
        mining.TripletLoss("easy")


def test_the_loss_has_a_gradient_where_nothing_is_mined():
    vectors = torch.eye(4).repeat_interleave(2, 0).requires_grad_()
    loss = mining.TripletLoss("semihard")(vectors, torch.arange(4).repeat_interleave(2))
    loss.backward()
    assert float(loss.detach()) == 0
    assert vectors.grad is not None


def learn_points(kind, seed):
    """Noisy points of 16 people through a small net; mean squared distance at the end, and the last loss."""
    torch.manual_seed(seed)
    labels = torch.arange(16).repeat_interleave(10)
    points = torch.randn(16, 16)[labels] + 2 * torch.randn(160, 16)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer, loss = torch.optim.Adam(net.parameters(), lr=2e-2), mining.TripletLoss(kind)
    for batch in mining.balanced_order(labels, 8, 5, 120, seed)(0):
        found = loss(normalize(net(points[batch]), dim=-1), labels[batch])
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    vectors = normalize(net(points), dim=-1).detach()
    return float(torch.cdist(vectors, vectors).square().mean()), float(found.detach())


def test_hardest_negatives_collapse_the_embedding():
    """All vectors end in one place, where the loss is the margin; semi-hard negatives keep them apart."""
    for seed in range(2):
        spread, loss = learn_points("hard", seed)
        assert spread < 0.5
        assert loss == pytest.approx(mining.MARGIN, abs=0.05)
        assert learn_points("semihard", seed)[0] > 1.5


def test_batches_hold_as_many_pictures_of_each_person():
    labels = torch.tensor([0] * 7 + [1] * 2 + [2] * 9 + [3] * 4 + [4] * 5)
    before = np.random.get_state()[1].tolist()
    order = mining.balanced_order(labels, people=3, pictures=4, batches=5, seed=1)
    plan = order(0)
    assert len(plan) == 5
    for batch in plan:
        people = labels[batch]
        assert [int((people == person).sum()) for person in people.unique()] == [4, 4, 4]
    assert plan == order(0) != order(1)
    assert plan != mining.balanced_order(labels, 3, 4, 5, seed=2)(0)
    assert np.random.get_state()[1].tolist() == before
    assert len(mining.balanced_order(labels, 20, 4, 1, 0)(0)[0]) == 20  # five people are all there are
    with pytest.raises(ValueError, match="two people or more, got 1"):
        mining.balanced_order(torch.zeros(5), 3, 4, 5, 0)


@pytest.mark.parametrize(("kind", "side", "millions"), [("nn1", 220, 140.0), ("nn2", 224, 7.5)])
def test_the_papers_networks_have_its_parameters_and_operations(kind, side, millions):
    """FLOPS in the paper's tables are multiply-adds; torch counts two operations for each."""
    with torch.device("meta"):
        network = build(NetworkSpec(kind, (side, side), 3))
        with FlopCounterMode(display=False) as counter:
            assert network(torch.empty(2, 3, side, side)).shape == (2, 128)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    assert counter.get_total_flops() / 2 / 2 / 1e9 == pytest.approx(1.6, rel=0.01)  # two pictures


@pytest.mark.parametrize("kind", ["small", "tiny", "transformer"])
@pytest.mark.parametrize(("size", "channels", "dim"), [((56, 48), 1, 128), ((32, 40), 3, 17)])
def test_small_networks_give_unit_vectors_whatever_the_light(kind, size, channels, dim):
    torch.manual_seed(0)
    network = build(NetworkSpec(kind, size, channels, dim)).eval()
    pictures = torch.rand(3, channels, *size)
    vectors = network(pictures)
    assert vectors.shape == (3, dim)
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(3), atol=1e-5)
    assert (network(0.3 + 0.6 * pictures) - vectors).norm(dim=-1).max() < 0.5 * torch.pdist(vectors).min()
    assert bool(network(torch.zeros(2, channels, *size)).isfinite().all())


def test_networks_say_what_they_cannot_do():
    assert set(KINDS) == {"small", "tiny", "transformer", "nn1", "nn2"}
    with pytest.raises(ValueError, match="no network 'large': there are small"):
        build(NetworkSpec("large"))
    with pytest.raises(ValueError, match="multiple of 8 high and wide, got 50 x 48"):
        build(NetworkSpec(size=(50, 48)))


def test_views_move_turn_and_light_pictures():
    torch.manual_seed(0)
    pictures = torch.rand(4, 1, 16, 24)
    still = Augmentation(*[0.0] * 9)
    assert torch.allclose(augment(pictures, still), pictures.clamp_min(1e-4), atol=1e-5)
    moved = augment(pictures, Augmentation(bend=0.05))
    assert moved.shape == pictures.shape
    assert (moved - pictures).abs().mean() > 0.02
    # A turn keeps shapes also where pictures are not square: a disk stays where it is.
    y, x = torch.meshgrid(torch.arange(16) - 7.5, torch.arange(24) - 11.5, indexing="ij")
    disk = torch.sigmoid(5 - (x**2 + y**2).sqrt()).expand(4, 1, 16, 24)
    assert (augment(disk, replace(still, turn=90.0)) - disk).abs().max() < 0.1


def test_pictures_of_any_kind_are_read_and_broken_ones_named(tmp_path):
    grey = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8) * 5)
    (tmp_path / "ada").mkdir()
    for mode in ("L", "RGB", "RGBA", "P", "1", "LA", "CMYK"):
        suffix = "tif" if mode == "CMYK" else "png"
        grey.convert(mode).save(tmp_path / "ada" / f"{mode}.{suffix}")
    Image.fromarray(np.arange(48, dtype=np.uint16).reshape(6, 8) * 1000).save(tmp_path / "ada" / "deep.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    grey.save(tmp_path / "turned.jpg", exif=turned)
    (tmp_path / "ada" / "broken.jpg").write_bytes((tmp_path / "turned.jpg").read_bytes()[:200])
    (tmp_path / "note.txt").write_text("not a picture")
    (tmp_path / ".hidden").write_text("")
    found = images.read_folder(tmp_path)
    small = images.read_folder(tmp_path, (8, 16), 3)
    assert {image.size for image in small.images} == {(16, 8)}
    assert torch.equal(images.to_tensor(small.images, (8, 16), 3), images.to_tensor(found.images, (8, 16), 3))
    assert len(found) == 9
    assert {image.mode for image in found.images} == {"L", "RGB"}
    assert sorted(path.name for path, _ in found.broken) == ["broken.jpg", "note.txt"]
    assert found.report().startswith("9 pictures of 1 people, 2 skipped:")
    assert "note.txt: cannot identify" in found.report()
    at = [path.name for path in found.paths].index("turned.jpg")
    assert (found.people[at], found.images[at].size) == (None, (6, 8))
    deep = found.images[[path.name for path in found.paths].index("deep.png")]
    assert (np.asarray(deep).min(), np.asarray(deep).max()) == (0, 255)
    with pytest.raises(ValueError, match=r"turned.jpg has no person: put pictures into a folder"):
        found.labels()
    with pytest.raises(ValueError, match="is not a folder"):
        images.scan(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="does not exist"):
        images.open_image(tmp_path / "nowhere.jpg")


@pytest.mark.parametrize(
    "error", [TypeError("a"), struct.error("a"), IndexError("a"), Image.DecompressionBombError("a")]
)
def test_whatever_pillow_raises_a_file_is_named_and_skipped(error, tmp_path, monkeypatch):
    write_people(tmp_path, people=1, each=2)

    def damaged(image):
        if image.filename.endswith("1.png"):
            raise error
        return image

    monkeypatch.setattr(images.ImageOps, "exif_transpose", damaged)
    found = images.read_folder(tmp_path)
    assert len(found) == 1
    assert found.broken == [(tmp_path / "p0" / "1.png", "a")]


def test_pictures_are_cut_from_the_middle():
    wide = np.zeros((10, 30), np.uint8)
    wide[:, 10:20] = 255
    tensor = images.to_tensor([Image.fromarray(wide)], (8, 8))
    assert tensor.shape == (1, 1, 8, 8)
    assert tensor.min() > 0.9
    assert images.to_tensor([Image.fromarray(wide)], (16, 8), 3).shape == (1, 3, 16, 8)
    assert images.to_tensor([], (16, 8)).shape == (0, 1, 16, 8)


def test_an_embedder_comes_back_the_same(tmp_path):
    torch.manual_seed(0)
    spec = NetworkSpec("tiny", (32, 24), 1, 16)
    embedder = Embedder(spec, whitening=torch.randn(16, 16), threshold=0.7, about={"people": 3})
    embedder.save(tmp_path / "model")
    again = Embedder.load(tmp_path / "model")
    shown = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (30, 30), np.uint8)) for i in range(5)]
    vectors = embedder.embed(shown, batch_size=2)
    assert torch.equal(vectors, again.embed(shown, batch_size=2))
    assert (again.spec, again.threshold, again.about) == (spec, 0.7, {"people": 3})
    assert again.digest() == embedder.digest() != Embedder(spec).digest()
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(5), atol=1e-5)
    mirrored = again.embed([image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in shown])
    assert torch.allclose(mirrored, vectors, atol=1e-4)
    assert again.embed([]).shape == (0, 16)
    with pytest.raises(ValueError, match=r"no embedder.json in .*linattn lab faces train"):
        Embedder.load(tmp_path)


def test_whitening_makes_people_scatter_alike_in_all_directions():
    torch.manual_seed(0)
    labels = torch.arange(30).repeat_interleave(10)
    points = torch.randn(30, 6)[labels] + torch.randn(300, 6) * torch.tensor([0.1, 0.2, 0.5, 1.0, 2.0, 3.0])
    still = Augmentation(*[0.0] * 9)
    pictures = (points - points.min() + 1)[
        :, None, None
    ]  # vectors as pictures of one row, through a network that is none
    matrix = whitening_of(nn.Flatten(), pictures, labels, still, shrink=1e-6, copies=1)
    white = points @ matrix
    within = torch.cat([white[labels == k] - white[labels == k].mean(0) for k in range(30)])
    assert torch.allclose(within.T @ within / len(within), torch.eye(6), atol=1e-3)


def test_a_new_vector_meets_an_old_one_as_if_both_were_whitened():
    torch.manual_seed(0)
    labels = torch.arange(30).repeat_interleave(10)
    points = torch.randn(30, 6)[labels] + torch.randn(300, 6) * torch.tensor([0.1, 0.2, 0.5, 1.0, 2.0, 3.0])
    still, pictures = Augmentation(*[0.0] * 9), (points - points.min() + 1)[:, None, None]
    both, twice = torch.cat([pictures, pictures.flip(-1)]), torch.cat([labels, labels + 30])
    white = whitening_of(nn.Flatten(), both, twice, still, shrink=0.3)
    new = points @ harmonic_whitening_of(nn.Flatten(), pictures, labels, still)
    assert torch.allclose(new @ points.T, (points @ white) @ (points @ white).T, rtol=1e-3, atol=1e-3)


def test_train_on_a_folder_tells_unseen_people_apart_and_resumes(tmp_path, capsys):
    write_people(tmp_path / "photos")
    (tmp_path / "photos" / "p0" / "broken.png").write_text("")
    words = ["lab", "faces", "train", str(tmp_path / "photos"), "--model", str(tmp_path / "model"), "--network", "tiny"]
    words += ["--size", "32", "24", "--dim", "16", "--people", "6", "--pictures", "3", "--held-out", "0.3", "--steps"]
    assert main([*words, "30"]) == 0
    said = capsys.readouterr().out
    assert "40 pictures of 8 people, 1 skipped" in said
    assert "trained on 6 people\nthreshold" in said
    assert "held-out people: 2," in said
    embedder = Embedder.load(tmp_path / "model")
    assert embedder.about["val"] > 0.9
    assert 0 < embedder.about["threshold_95"][0] <= embedder.threshold <= embedder.about["threshold_95"][1] < 4
    first = embedder.digest()
    assert main([*words, "30"]) == 0  # nothing is left to do
    assert Embedder.load(tmp_path / "model").digest() == first
    assert main(["lab", "faces", "train", str(tmp_path / "photos" / "p0"), "--model", str(tmp_path / "none")]) == 2
    assert "has no person" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_harmonic_vectors_compare_with_old_ones(tmp_path):
    """A new network in the space of an old one: across both, people are told apart; without it they are not."""
    write_people(tmp_path, people=10)
    found = images.read_folder(tmp_path)
    labels, _ = found.labels()
    spec = NetworkSpec("tiny", (32, 24), 1, 16)
    recipe = Recipe(spec, steps=40, people=8, pictures=3)
    pictures = images.to_tensor(found.images, spec.size)
    known, unseen = labels < 7, labels >= 7
    old, _ = train(recipe, pictures[known], labels[known], seed=0)
    apart, _ = train(recipe, pictures[known], labels[known], seed=1)
    before = Embedder(spec, old).digest()
    new, _ = train(recipe, pictures[known], labels[known], seed=1, old=old)
    assert Embedder(spec, old).digest() == before  # frozen

    def across(network):
        with torch.no_grad():
            first, second = network(pictures[unseen]).numpy(), old(pictures[unseen]).numpy()
        return evaluate.auc(evaluate.cross_pairs(first, second, labels[unseen].numpy()))

    assert across(new) > 0.73 > across(apart)
