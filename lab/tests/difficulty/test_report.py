"""`linattn lab difficulty` as a user runs it: train, measure and report."""

import json
import re

import numpy as np
import pytest
import torch

from cli_support import refusal
from linattn.cli import main
from linattn_lab.difficulty import Measured, runs
from linattn_lab.difficulty.figures import figures_of
from linattn_lab.figures.published import read_figures
from linattn_lab.images import load
from linattn_lab.training.config import TrainConfig

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
