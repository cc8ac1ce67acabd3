"""Example difficulty: probes, nearest neighbours and depth against their definitions, and the report as a user runs it."""

import json
import re

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from cli_support import refusal
from linattn.cli import main
from linattn_lab.difficulty import Measured, activations, knn_probe, measure, points, prediction_depth, runs, vote
from linattn_lab.difficulty.depth import bands
from linattn_lab.difficulty.figures import figures_of
from linattn_lab.difficulty.statistics import by_depth, partial_rank_correlation, rank_correlation
from linattn_lab.figures.published import read_figures
from linattn_lab.images import Part, ResNet18, generate, load, scores, train
from linattn_lab.neighbours import smallest
from linattn_lab.training.config import TrainConfig

PROBES = ("input", "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc")


def all_of(model, images, point, batch=500):
    return torch.cat(list(activations(model, images, point, batch)))


@pytest.fixture(scope="module")
def small():
    """A network with random weights, and its outputs step by step."""
    torch.manual_seed(0)
    model = ResNet18(4, width=4, stem="imagenet", channels=1).eval()
    images = torch.rand(7, 1, 16, 16)
    steps = {"input": images}
    with torch.no_grad():
        for (name, module), before in zip(model.named_children(), PROBES):
            x = steps[before]
            steps[name] = module(x.flatten(1) if name == "fc" else x)
    return model, images, steps


def test_a_resnet_is_probed_at_eleven_points(small):
    model, images, steps = small
    assert points(model) == PROBES
    for name in PROBES:
        torch.testing.assert_close(all_of(model, images, name, batch=3), steps[name].flatten(1))
    assert torch.equal(all_of(model, images, "fc"), scores(model, images))


def test_probes_reach_any_module_and_leave_no_hook(small):
    model, images, steps = small
    with torch.no_grad():
        inner = model.layer1[0].conv1(steps["maxpool"])
    assert torch.equal(all_of(model, images, "layer1.0.conv1"), inner.flatten(1))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_relu_in_place_does_not_reach_the_probe_before_it():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    found = all_of(model, torch.randn(5, 1, 4, 4), "2")
    assert (found < 0).any()


def test_a_module_that_writes_over_its_last_output_is_probed_right():
    class Reusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("room", torch.zeros(2, 9))

        def forward(self, x):
            return self.room.copy_(x.flatten(1))

    images = torch.rand(6, 1, 3, 3)
    assert torch.equal(all_of(nn.Sequential(Reusing()), images, "0", batch=2), images.flatten(1))


def test_points_that_cannot_be_probed_say_why(small):
    model, images, _ = small
    with pytest.raises(ValueError, match=r"no module 'layer9': a point is 'input' or a name"):
        all_of(model, images, "layer9")

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.pair = nn.Linear(2, 2), nn.LSTM(3, 2)

        def forward(self, x):
            return self.pair(x[:, 0])[0]

    with pytest.raises(ValueError, match="does not come through 'unused'"):
        all_of(Odd(), torch.rand(2, 1, 3, 3), "unused")
    model = Odd()
    with pytest.raises(TypeError, match="'pair' puts out a tuple"):
        all_of(model, torch.rand(2, 1, 3, 3), "pair")
    assert not model.pair._forward_hooks


@pytest.mark.parametrize(("k", "features"), [(30, 40), (4, 16), (1, 17)])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("chunk", [2000, 37])
def test_votes_are_those_of_scikit_learn(k, features, twice, chunk, monkeypatch):
    """Also where votes are equal (often, for k = 4), and where references occur twice, so that distances are."""
    monkeypatch.setattr(knn_probe, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(k)
    references = torch.randn(400, features, generator=generator)
    queries = torch.randn(150, features, generator=generator)
    labels = torch.randint(0, 5, (400,), generator=generator)
    if twice:
        references[200:], labels[200:] = references[:200], labels[:200]
    oracle = KNeighborsClassifier(k, algorithm="brute").fit(references.numpy(), labels.numpy())
    found = vote(queries, references.split(90), labels, k=k)
    assert found.tolist() == oracle.predict(queries.numpy()).tolist()


def test_of_equal_distances_the_first_counts_and_of_equal_votes_the_smaller_class():
    references = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    labels = torch.tensor([2, 0, 1, 1])
    query = torch.zeros(1, 1)
    assert vote(query, [references], labels, k=1).tolist() == [2]
    assert vote(query, [references], labels, k=2).tolist() == [0]
    assert vote(query, [references], labels, k=4).tolist() == [1]
    values = torch.tensor([[3.0, 1, 2, 1, 2, 1], [5.0, 5, 5, 5, 5, 5]])
    assert smallest(values, 4).tolist() == [[1, 2, 3, 5], [0, 1, 2, 3]]


def test_distances_far_from_the_origin_are_told_apart():
    """In float32 the squares of such numbers swallow their differences."""
    references = torch.tensor([[4096.0], [4097.0]])
    assert vote(torch.tensor([[4096.75]]), [references], torch.tensor([0, 1]), k=1).tolist() == [1]


def test_neighbours_that_cannot_vote_are_refused():
    x, labels = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="k must be 1 to the number of references, 3; got 4"):
        vote(x, [x], labels, k=4)
    with pytest.raises(ValueError, match="2 references and 3 labels"):
        vote(x, [x[:2]], labels, k=2)
    with pytest.raises(ValueError, match="must be finite"):
        vote(x, [x / 0], labels, k=2)


@pytest.mark.parametrize(
    ("probes", "network", "depth"),
    [
        ([1, 1, 1, 1], 1, 0),  # the input already agrees
        ([0, 1, 1, 1], 1, 1),
        ([1, 0, 1, 1], 1, 2),  # an early agreement that does not last counts for nothing
        ([0, 0, 0, 1], 1, 3),
        ([1, 1, 1, 0], 1, 4),  # all but the last agree
        ([2, 2, 2, 2], 1, 4),  # the probes agree among themselves, not with the network
    ],
)
def test_depth_is_the_first_probe_from_which_all_agree_with_the_network(probes, network, depth):
    assert prediction_depth(torch.tensor(probes)[:, None], torch.tensor([network])).tolist() == [depth]


def test_depth_of_many_pictures_is_that_of_each():
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(0, 2, (11, 300), generator=generator)
    network = torch.randint(0, 2, (300,), generator=generator)
    naive = [min(d for d in range(12) if all(p == n for p in row[d:])) for row, n in zip(probes.T, network)]
    assert prediction_depth(probes, network).tolist() == naive
    with pytest.raises(ValueError, match=r"got \(11, 300\) and \(299,\)"):
        prediction_depth(probes, network[1:])


def test_accuracy_by_depth_counts_every_picture_once():
    generator = torch.Generator().manual_seed(1)
    probes = torch.randint(0, 2, (11, 300), generator=generator)
    network, labels = torch.randint(0, 2, (2, 300), generator=generator)
    measured = Measured(probes, network, torch.ones(300), torch.arange(300), labels)
    found = by_depth([measured, measured])
    assert sum(found.counts) == 600
    assert sum(count for _, count, _ in found.single) == 600
    for (first, last), count, accuracy in zip(found.bands, found.counts, found.accuracy):
        inside = [i for i in range(300) if first <= measured.depth[i] <= last]
        assert count == 2 * len(inside) > 0
        assert accuracy == pytest.approx(np.mean([network[i] == labels[i] for i in inside]))


@pytest.mark.parametrize(
    ("depths", "expected"), [(12, [(0, 2), (3, 5), (6, 8), (9, 11)]), (3, [(0, 0), (1, 1), (2, 2)])]
)
def test_bands_are_of_like_width_and_leave_no_depth_out(depths, expected):
    assert bands(depths) == expected


def test_what_two_things_have_from_a_third_is_taken_out():
    generator = np.random.default_rng(0)
    third, one, other = generator.standard_normal((3, 2000))
    rho, p = rank_correlation(one + 2 * third, other + 2 * third)
    assert rho > 0.7
    assert p < 1e-9
    rho, p = partial_rank_correlation(one + 2 * third, other + 2 * third, third)
    assert abs(rho) < 0.1
    assert partial_rank_correlation(one + third, -one + third, third)[0] < -0.8


def test_a_measurement_is_scikit_learns_vote_at_every_point(small):
    model, _, _ = small
    drawn = load("shapes", train=80, test=40)
    references, queries = drawn.train, drawn.test
    (found,) = measure(model, references, [queries], k=30)
    assert torch.equal(found.network, scores(model, queries.images).argmax(1))
    for probe, name in zip(found.probes, PROBES):
        oracle = KNeighborsClassifier(30, algorithm="brute").fit(
            all_of(model, references.images, name).double(), references.labels
        )
        expected = oracle.predict(all_of(model, queries.images, name).double().numpy())
        assert probe.tolist() == expected.tolist(), name
    assert torch.equal(found.depth, prediction_depth(found.probes, found.network))


def test_any_module_can_be_measured():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))
    drawn = load("shapes", train=60, test=20)
    parts = drawn.test.take(torch.arange(12)), drawn.test.take(torch.arange(12, 20))
    one, other = measure(model, drawn.train, parts, at=["input", "1", "3"], k=5)
    assert one.probes.shape == (3, 12)
    assert other.probes.shape == (3, 8)
    (both,) = measure(model, drawn.train, [drawn.test], at=["input", "1", "3"], k=5)
    assert torch.equal(torch.cat([one.probes, other.probes], 1), both.probes)


@pytest.mark.slow
def test_small_and_noisy_pictures_are_deep_and_deep_ones_more_often_wrong():
    """Circles and triangles alone, which a tiny network tells apart within seconds."""
    drawn = generate(12000, 0, noise=(0.0, 0.6))
    two = torch.from_numpy(np.flatnonzero((drawn.labels == 0) | (drawn.labels == 3)))
    labels = (torch.from_numpy(drawn.labels) == 3).long()
    whole = Part(torch.from_numpy(drawn.images), labels, drawn.truth).take(two)
    learnt, test = whole.take(torch.arange(3000)), whole.take(torch.arange(3000, 4000))
    torch.manual_seed(0)
    model = ResNet18(2, width=8, stem="imagenet", channels=1)
    config = TrainConfig(steps=120, batch_size=64, lr=5e-3, warmup=10, weight_decay=0.05, validate_every=1000)
    train(model, learnt, config, validation=0, show=False)
    (found,) = measure(model, learnt.take(torch.arange(1500)), [test])
    depth = found.depth.numpy()
    for name, sign in (("noise", 1), ("size", -1)):
        rho, p = rank_correlation(depth, test.truth[name])
        assert sign * rho > 0
        assert p < 1e-3
    shallow = depth <= np.median(depth)
    right = found.right.numpy()
    assert right[shallow].mean() > right[~shallow].mean() + 0.02


TINY = ["--pictures", "240", "--test", "80", "--width", "4", "--steps", "6", "--batch-size", "32", "--warmup", "2"]
PROBING = ["--k", "7", "--references", "100", "--queries", "60", "--held-out", "30"]


def test_report_trains_and_measures_what_is_missing_and_is_quick_the_second_time(tmp_path, capsys, monkeypatch):
    folder, figures = tmp_path / "run", tmp_path / "figures.json"
    words = ["lab", "difficulty", "report", "--folder", str(folder), *PROBING]
    assert main([*words, "--seeds", "2", *TINY, "--json", str(figures), "--picture", str(tmp_path / "o.png")]) == 0
    first = capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert {"spearman_noise", "p_noise", "spearman_size", "p_size", "accuracy_by_depth"} <= set(found)
    assert sum(found["depth_counts"]) == 2 * 60
    assert f"{found['spearman_noise']:+.4f}" in first
    assert f"noise, size held equal          {found['spearman_noise_at_equal_size']:+.4f}" in first
    assert f"size, that distance held equal  {found['spearman_size_at_equal_place']:+.4f}" in first
    each = ", ".join(f"{depth}: {accuracy:.3f}" for depth, accuracy in found["accuracy_at_each_depth"].items())
    assert f"accuracy at each depth, test                          {each}" in first
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles[:2] == ["The pictures", "Depth and accuracy"]
    assert {"Easiest", "Hardest", "Classes", "Depth and ground truth", "Consistency"} <= set(titles)
    assert page.count('src="data:image/png;base64,') == len(titles)
    assert not re.search(r"(src|href)=.?http", page)

    def never(*args, **options):
        raise AssertionError("trained or measured again")

    monkeypatch.setattr(runs, "train", never)
    monkeypatch.setattr(runs, "measure", never)
    published = tmp_path / "published.json"
    assert main([*words, "--figures", str(published)]) == 0  # the folder knows what it was trained on
    printed = read_figures(published)
    assert printed["correlation|noise|Spearman"].value == pytest.approx(found["spearman_noise"])
    assert printed["correlation|depth in another network|Spearman"].value == pytest.approx(found["consistency"])
    assert printed["accuracy|all|test"].value == pytest.approx(np.mean(found["accuracy"]))
    bands = [printed[f"accuracy|{band}|test"].value for band in found["depth_bands"]]
    assert bands == pytest.approx(found["accuracy_by_depth"])
    assert sum(printed[f"accuracy|{band}|share of test"].value for band in found["depth_bands"]) == pytest.approx(1)
    assert all(one.seeds == (0, 1) and one.low < one.high for one in printed.values() if 0 < one.value < 1)
    again = capsys.readouterr().out
    assert again.split("wrote")[0] == first.split("wrote")[0]
    assert main([*words, "--width", "8"]) == 2
    assert "was made with width = 4, not 8: choose another --folder" in capsys.readouterr().err
    assert main([*words, "--k", "5"]) == 1
    assert "trained or measured again" in capsys.readouterr().err


def test_train_then_measure_then_report_without_ground_truth(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = [word if word != "80" else "70" for word in TINY]
    assert main(["lab", "difficulty", "train", "--data", "fashion", "--seeds", "1", *size]) == 0
    assert "accuracy on the test pictures" in capsys.readouterr().out
    assert main(["lab", "difficulty", "measure", "--data", "fashion", *PROBING]) == 0
    assert "60 test" in capsys.readouterr().out
    assert main(["lab", "difficulty", "report", "--data", "fashion", *PROBING, "--json", "f.json"]) == 0
    assert "between networks" not in capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["spearman_noise"] is None
    assert found["consistency"] is None
    assert found["held_out_accuracy_by_depth"] is None
    titles = re.findall(r"<h2>(.*?)</h2>", (tmp_path / "difficulty-fashion" / "report.html").read_text())
    assert "Hardest" in titles
    assert not {"Depth and ground truth", "Consistency"} & set(titles)


def test_every_training_picture_is_measured_by_a_network_that_has_not_seen_it(tmp_path):
    run = runs.Run(tmp_path, pictures=60, seeds=3, width=4, config=TrainConfig(steps=2, batch_size=16, warmup=1))
    images = run.images()
    outcome = runs.measure_run(run, images, run.train(images), runs.Probing(k=3, queries=5))
    held = [part.places for part in outcome.held_out]
    assert sorted(torch.cat(held).tolist()) == list(range(60))
    for net, (part, places) in enumerate(zip(outcome.held_out, held)):
        assert not set(run.split(60, net)[0].tolist()) & set(places.tolist())
        assert torch.equal(part.labels, images.train.labels[places])
    assert all(torch.equal(part.labels, images.test.labels[:5]) for part in outcome.test)


def test_intervals_of_figures_know_images_and_networks():
    """100 images that three networks see alike: the bootstrap's interval; networks that differ widen it."""
    images = load("shapes", train=10, test=400)
    generator = torch.Generator().manual_seed(0)

    def outcome(*rates):
        parts = []
        for rate in rates:
            wrong = torch.rand(400, generator=generator) < rate
            said = torch.where(wrong, (images.test.labels + 1) % 6, images.test.labels)
            parts.append(Measured(said.expand(3, -1), said, torch.ones(400), torch.arange(400), images.test.labels))
        held = [Measured(p.probes[:, :0], p.network[:0], p.sureness[:0], p.places[:0], p.labels[:0]) for p in parts]
        return runs.Outcome(("a", "b", "c"), parts, held)

    one = figures_of(outcome(0.2), images, (0,))["accuracy|all|test"]
    assert (one.high - one.low) / 2 == pytest.approx(1.96 * (one.value * (1 - one.value) / 400) ** 0.5, rel=0.25)
    apart = figures_of(outcome(0.05, 0.2, 0.5), images, (0, 1, 2))["accuracy|all|test"]
    assert apart.high - apart.low > 5 * (one.high - one.low)
    assert (apart.low, apart.high) == (max(0, apart.low), min(1, apart.high))


@pytest.mark.parametrize("name", ["train", "measure", "report"])
def test_help_teaches_by_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lab", "difficulty", name, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  linattn lab difficulty {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--k", "0"], "--k must be at least 1, got 0"),
        (["--data", "nowhere"], "or a folder, got 'nowhere'"),
    ],
)
def test_what_a_user_can_put_right_is_one_sentence(words, sentence, tmp_path, capfd):
    assert sentence in refusal(["lab", "difficulty", "report", "--folder", str(tmp_path / "x"), *words], capfd)
