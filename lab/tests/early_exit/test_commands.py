"""Early exit from training to the user's own pictures."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from linattn.cli import main
from linattn_lab.early_exit import Confidence, study
from linattn_lab.early_exit.backbones import transformer_exits
from linattn_lab.early_exit.sweep import all_logits
from linattn_lab.early_exit.training import Bench, Pictures, exits_loss, load_exits
from linattn_lab.images.datasets import Part
from linattn_lab.images.shapes import generate
from linattn_lab.images.training import train
from linattn_lab.training.config import TrainConfig


def test_from_training_to_pictures_of_one_s_own(tmp_path, capsys, monkeypatch):
    """All four commands on a network that has hardly learned."""
    monkeypatch.setattr(study, "TIMED", {1: 8, 128: 128})
    monkeypatch.setattr(study, "REFERENCES", 100)
    folder, page, figures = (str(tmp_path / name) for name in ("nets", "page.html", "figures.json"))
    small = ["--folder", folder, "--train", "900", "--test", "128", "--validation", "200", "--steps", "12", "--quiet"]
    small += ["--distill-steps", "3"]
    small += ["--width", "4", "--batch-size", "32", "--warmup", "2"]
    few = ["--static", "2", "--transformer-steps", "12"]
    command = ["lab", "early-exit"]
    assert main([*command, "train", *small]) == 0
    assert "accuracy of the exits on validation pictures" in capsys.readouterr().out
    assert main([*command, "predict", "missing.png", "--folder", folder]) == 2
    assert "no rule was chosen" in capsys.readouterr().err

    assert main([*command, "sweep", "--folder", folder, "--budget", "1e6", "--json", figures]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["chosen"]["macs"] <= 1e6
    assert main([*command, "sweep", "--folder", folder, "--floor", "1.01"]) == 2
    capsys.readouterr()

    output = ["--html", page, "--json", figures, "--picture", str(tmp_path / "curves.png")]
    assert main([*command, "report", *small, *few, *output]) == 0
    said = capsys.readouterr().out
    assert "multiply-adds of convolutions" in said
    found = json.loads((tmp_path / "figures.json").read_text())
    assert (found["macs_full_6000"], found["macs_course"]) == (3336213504000, 2305700339712)
    assert found["mac_ratio"] == pytest.approx(found["macs_full"] / found["chosen"]["macs"])
    assert found["full_accuracy"] == max(found["full_accuracy_without_exits"], found["full_accuracy_last_exit"])
    assert found["latency_ratio_batch1"] > 0
    assert found["latency_ratio_batch128"] > 0
    assert [s["width"] for s in found["static"]] == [2, 4]
    transformer = found["transformer"]
    assert transformer["mac_ratio"] == pytest.approx(transformer["macs_full"] / transformer["macs"])
    assert transformer["latency_ratio_batch1"] > 0
    assert re.search(f"transformer, early exit +{transformer['accuracy']:.4f}", said)
    assert re.search(f"transformer, all layers +{transformer['full_accuracy']:.4f}", said)
    text = (tmp_path / "page.html").read_text()
    assert text.count("data:image/png;base64,") == 5
    assert "http" not in text

    Image.fromarray(np.full((40, 30, 3), 128, np.uint8)).save(tmp_path / "grey.png")
    assert main([*command, "predict", str(tmp_path / "grey.png"), "--folder", folder, "--json", figures]) == 0
    (answer,) = json.loads((tmp_path / "figures.json").read_text())
    assert answer["class"] in ("circle", "square", "rectangle", "right_triangle", "heart", "ellipse")
    assert 1 <= answer["exit"] <= 4
    assert 1 / 6 <= answer["confidence"] <= 1

    assert main([*command, "train", *small[:-6], "--width", "2", "--batch-size", "32", "--warmup", "2"]) == 2
    assert "width 4, not 2" in capsys.readouterr().err


def test_a_transformer_with_linear_attention_learns_and_its_sequences_leave_early():
    """Circles and triangles alone: two layers tell them apart within seconds."""
    drawn = generate(3600, 0, noise=(0.0, 0.2))
    two = np.flatnonzero((drawn.labels == 0) | (drawn.labels == 3))
    images, labels = torch.from_numpy(drawn.images[two]), torch.from_numpy(drawn.labels[two] // 3)
    torch.manual_seed(0)
    model = transformer_exits(2, dim=32, heads=2, layers=2)
    config = TrainConfig(steps=120, batch_size=32, lr=3e-3, warmup=10, weight_decay=0.05, validate_every=1000)
    train(model, Part(images[:1000], labels[:1000]), config, loss=exits_loss((1.0, 1.0)), validation=0, show=False)
    found = model.predict(images[1000:], Confidence(0.9))
    right = (found.classes == labels[1000:]).double()
    assert right.mean() > 0.95
    assert 0.5 < (found.exits == 0).double().mean() < 1
    with torch.no_grad():
        full = (model.full(images[1000:]).argmax(-1) == labels[1000:]).double().mean()
    assert right.mean() > full - 0.03


def test_a_folder_of_few_pictures_can_be_learned(tmp_path, capsys):
    drawn = generate(72)
    for number, (image, label) in enumerate(zip(drawn.images[:, 0], drawn.labels)):
        (tmp_path / "photos" / str(label % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).astype(np.uint8)).resize((50, 40)).save(
            tmp_path / "photos" / str(label % 2) / f"{number}.png"
        )
    command = ["lab", "early-exit"]
    folder = ["--folder", str(tmp_path / "nets")]
    small = ["--data", str(tmp_path / "photos"), "--side", "16", "--steps", "3", "--width", "2", "--quiet"]
    small += ["--distill-steps", "2"]
    assert main([*command, "train", *folder, *small]) == 0
    assert main([*command, "sweep", *folder]) == 0
    capsys.readouterr()
    assert main([*command, "predict", *folder, *map(str, (tmp_path / "photos" / "0").glob("*.png"))]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 36
    assert main([*command, "report", *folder, *small, "--static", "--validation", "40"]) == 2
    assert "of 58 training pictures 40 cannot be kept" in capsys.readouterr().err
    assert main([*command, "report", *folder, *small, "--side", "18", "--static"]) == 2
    assert "whose side 4 divides, got 18: choose another --side" in capsys.readouterr().err


def test_the_trained_network_is_the_one_that_is_loaded(tmp_path):
    config = TrainConfig(steps=3, batch_size=16, warmup=1)
    bench = Bench(tmp_path, Pictures("shapes", 700, 50, 100), config, distill_steps=2, show=False)
    trained = bench.exits(2)
    model, pictures, _ = load_exits(tmp_path)
    images = pictures.split().test.images
    assert images.equal(bench.parts.test.images)
    torch.testing.assert_close(all_logits(model, images), all_logits(trained, images))


@pytest.mark.parametrize("name", ["train", "sweep", "report", "predict", "seeds"])
def test_help_teaches_by_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lab", "early-exit", name, "--help"])
    assert ended.value.code == 0
    assert f"examples:\n  linattn lab early-exit {name}" in capsys.readouterr().out
