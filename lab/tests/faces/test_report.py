"""FaceNet measured: verification by hand, baselines, embeddings in few bits, and the report."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from cli_support import exit_code
from linattn.cli import main
from linattn_lab.faces.index.quantization import from_bytes, to_bytes
from linattn_lab.faces.networks import NetworkSpec
from linattn_lab.faces.reports import orl_protocol as protocol
from linattn_lab.faces.reports import study
from linattn_lab.faces.reports.report_figures import figures_of
from linattn_lab.faces.training import mining
from linattn_lab.faces.training.recipe import Recipe
from linattn_lab.faces.verification import metrics as evaluate
from linattn_lab.faces.verification.baselines import baselines
from linattn_lab.training.tensor_files import write_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def make_pairs(distance, same):
    count = len(distance)
    return evaluate.Pairs(np.array(distance), np.array(same, bool), np.zeros(count, int), np.arange(count))


def test_val_at_far_by_hand():
    pairs = make_pairs([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [1, 1, 0, 1, 0, 0, 0])
    assert evaluate.val_at_far(pairs, 0.0) == pytest.approx(2 / 3)
    assert evaluate.val_at_far(pairs, 0.24) == pytest.approx(2 / 3)  # four pairs of two people: none may pass
    assert evaluate.val_at_far(pairs, 0.25) == 1
    assert evaluate.auc(pairs) == pytest.approx(11 / 12)
    assert 0.4 < evaluate.best_threshold(pairs) < 0.5
    assert evaluate.accuracy(pairs, evaluate.best_threshold(pairs)) == pytest.approx((1 + 3 / 4) / 2)
    far, val = evaluate.roc(pairs)
    assert far.tolist() == [0, 0, 0, 0.25, 0.25, 0.5, 0.75, 1]
    assert val == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3, 1, 1, 1, 1])
    tied = make_pairs([0.3, 0.3, 0.5], [1, 0, 0])
    assert evaluate.val_at_far(tied, 0.4) == 0  # the nearest of two people is as near as the pair of one
    assert evaluate.auc(tied) == 0.75
    with pytest.raises(ValueError, match="pairs of one person and of two, got 2 of 2"):
        make_pairs([0.1, 0.2], [1, 1])


def test_figures_are_those_of_scikit_learn_and_of_brute_force():
    from sklearn.metrics import roc_auc_score

    people = np.repeat(np.arange(8), 6)
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(8, 5))[people] + 0.9 * generator.normal(size=(48, 5))
    pairs = evaluate.pairs_of(vectors, people)
    assert len(pairs.distance) == 48 * 47 // 2
    assert evaluate.auc(pairs) == pytest.approx(roc_auc_score(pairs.same, -pairs.distance))
    for far in (0.01, 0.05):
        passing = [t for t in pairs.distance if (pairs.distance[~pairs.same] <= t).mean() <= far]
        assert evaluate.val_at_far(pairs, far) == pytest.approx((pairs.distance[pairs.same] <= max(passing)).mean())
    low, high = evaluate.interval([[pairs, pairs]], 0.05)
    assert low < evaluate.val_at_far(pairs, 0.05) < high
    worse = evaluate.pairs_of(vectors + 0.5 * generator.normal(size=(48, 5)), people)
    low, high = evaluate.interval([[pairs, pairs]], 0.05, against=[[worse, worse]])
    assert 0 < low < evaluate.val_at_far(pairs, 0.05) - evaluate.val_at_far(worse, 0.05) < high
    assert evaluate.interval([[pairs]], 0.05, against=[[pairs]]) == (0, 0)
    assert evaluate.accuracy_by_folds([pairs, pairs]) == evaluate.accuracy(pairs, evaluate.best_threshold(pairs))
    both = evaluate.cross_pairs(vectors, vectors, people)
    assert evaluate.val_at_far(both, 0.05) == pytest.approx(evaluate.val_at_far(pairs, 0.05))


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.15), (2, 0.5), (1, 0.65)])
def test_fewer_bits_lose_more(bits, error):
    vectors = normalize(torch.randn(50, 128, generator=torch.Generator().manual_seed(0)), dim=-1).numpy()
    rows = to_bytes(vectors, bits)
    assert rows.dtype == np.int8
    assert len(np.unique(rows)) <= 2**bits
    back = from_bytes(rows)
    assert np.allclose(np.linalg.norm(back, axis=1), 1, atol=1e-6)
    assert error / 2 < np.linalg.norm(back - vectors, axis=1).mean() < error
    assert (back * vectors >= 0).all()


def test_bits_of_embeddings_are_eight_or_fewer():
    with pytest.raises(ValueError, match="bits must be 8, 4, 2 or 1, got 3"):
        to_bytes(np.eye(4), 3)


def test_baselines_know_only_the_training_people():
    generator = np.random.default_rng(0)
    people = np.repeat(np.arange(32), 10)
    pictures = 8 * generator.normal(size=(32, 15, 15))[people] + 8 * generator.normal(size=(320, 15, 15))
    found = baselines(pictures, people, people // 8)
    assert list(found) == ["pixels", "pca", "fisherfaces"]
    for one, folds in found.values():
        assert one["val_at_far_1e-2"] > 0.5
        assert [sorted(set(fold.left)) for fold in folds[:1]] == [list(range(8))]


def made_up_results(jobs):
    generator = np.random.default_rng(0)
    results = {}
    for job in jobs:
        people = protocol.people_of(job.fold)
        good = generator.normal(size=(40, job.recipe.spec.dim))[people] + generator.normal(
            size=(100, job.recipe.spec.dim)
        )
        good /= np.linalg.norm(good, axis=1, keepdims=True)
        parts = ["vectors", "plain"] + (["old"] if job.old else [])
        parts += [f"jpeg-{q}" for q in protocol.QUALITIES] if job.jpeg else []
        results[job] = dict.fromkeys(parts, good) | {"seconds": np.array(60.0)}
    return results


@pytest.fixture
def few_draws(monkeypatch):
    """Bootstraps of 40 draws instead of 400."""
    monkeypatch.setattr(evaluate, "_draws", partial(evaluate._draws, draws=40))


@pytest.mark.usefixtures("few_draws")
def test_the_report_has_its_figures_tables_and_plots(tmp_path):
    from linattn_lab.faces.reports import plots as pictures
    from linattn_lab.faces.reports import report_page as page
    from linattn_lab.faces.reports import report_text as report_command

    whole = study.Study(Recipe(), seeds=2)
    results = made_up_results(whole.jobs())
    one = {"val_at_far_1e-2": 0.7, "val_at_far_1e-3": 0.5, "pooled_1e-2": 0.6, "pooled_1e-3": 0.4, "auc": 0.9}
    known = {name: one | {"accuracy": 0.9} for name in ("pixels", "pca", "fisherfaces")}
    found = whole.figures(results, known)
    found["minutes"] = 1.0
    json.dumps(found, allow_nan=False)
    assert {"val_at_far_1e-2", "val_at_far_1e-3", "auc", "seeds", "harmonic", "mining", "baselines"} <= set(found)
    assert list(found["harmonic"]) == ["old_old", "new_old", "new_new"]
    assert set(found["mining"]) == set(mining.KINDS)
    assert (found["mining"]["semihard"]["seeds"], found["mining"]["hard"]["seeds"]) == (4, 2)
    assert all(low <= 0 <= high for low, high in found["harmonic_gain_95"].values())  # the same vectors, old and new
    assert set(found["ablations"]) == {"network", "dimension", "people in training", "image size"}
    assert found["bytes"]["128"]["auc"] == pytest.approx(found["bytes"]["512"]["auc"], abs=1e-3)
    assert found["core_minutes"] == len(whole.jobs()) == len(set(whole.jobs()))
    assert all(low <= found[key] <= high for key, (low, high) in found["interval_95"].items())
    text = report_command.text(found)
    assert "fisherfaces" in text
    assert "new-old above old-old, 95 % over people: +0.000 to +0.000 at 1e-2" in text
    assert "semi-hard above random, 95 % over people" in text
    assert "JPEG quality" in text
    curves = {"network": protocol.tested_pairs(results, whole.default[0], "vectors")}
    pictures.draw(found, curves, tmp_path / "plots.png")
    with Image.open(tmp_path / "plots.png") as shown:
        assert shown.size[0] > 500
    faces = np.random.default_rng(0).integers(0, 255, (400, 112, 92), np.uint8)
    page.write(found, curves, faces, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<figure>") == 20
    assert "http" not in text


@pytest.mark.usefixtures("few_draws")
def test_published_figures_are_those_of_the_report_with_intervals_over_people():
    part = study.Study(Recipe(), seeds=1, ablations=False)
    part.ablations = {"dimension": {"32": protocol.over_folds(protocol.variant(Recipe(), dim=32), 0)}}
    results, generator = made_up_results(part.jobs()), np.random.default_rng(1)
    for found in results.values():
        noisy = found["vectors"] + generator.normal(size=found["vectors"].shape) / 6
        found.update(dict.fromkeys([name for name in found if name != "seconds"], noisy))
    folds = protocol.tested_pairs(results, part.default[0], "vectors")
    published = figures_of(part, results, {"pixels": folds})
    for far in (1e-2, 1e-3):
        name = f"VAL@FAR 1e{round(np.log10(far))}"
        network = published[f"verification|network|{name}"]
        assert network == published[f"verification|pixels|{name}"]  # which are the same vectors here
        assert network.value == pytest.approx(np.mean([evaluate.val_at_far(fold, far) for fold in folds]))
        assert network.low < network.value < network.high
        assert published[f"changed|dimension 32|{name}"].value != network.value
        assert published[f"gain|new-old above old-old|{name}"].value == 0  # the same vectors, old and new
        assert published[f"mining|semihard, 30 steps|{name}"].seeds == (0, 1)
        assert published[f"mining|random, 150 steps|{name}"].seeds == (0,)


def test_jobs_are_kept_and_not_done_again(tmp_path, monkeypatch):
    """Here without worker processes: those are started in the test of the command."""
    done = []

    def run_here(jobs, folder, workers, show):
        for job in jobs:
            done.append(job)
            protocol._keep(job, folder)

    monkeypatch.setattr(protocol, "_run_missing", run_here)
    tiny = Recipe(NetworkSpec("tiny", (32, 24), 1, 16), steps=1, people=4, pictures=2)
    job = protocol.Job(tiny, fold=1, seed=0, people=5, jpeg=True)
    found = protocol.run_jobs([job, job], tmp_path, workers=1)[job]
    assert found["vectors"].shape == found["jpeg-10"].shape == (100, 16)
    assert 0 < np.abs(found["jpeg-90"] - found["vectors"]).max() < np.abs(found["jpeg-10"] - found["vectors"]).max()
    (kept,) = tmp_path.glob("*.safetensors")
    before = kept.stat().st_mtime_ns
    again = protocol.run_jobs([job], tmp_path, workers=1)[job]
    assert kept.stat().st_mtime_ns == before
    assert done == [job]
    assert (again["vectors"] == found["vectors"]).all()
    assert replace(job, seed=1).name() != job.name()


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_the_report_runs_from_the_command_line(tmp_path, capsys, monkeypatch):
    """It continues one that was stopped: all trainings but one of the default and one of harmonic embeddings are kept."""
    whole = study.Study(
        Recipe(NetworkSpec("tiny", (32, 24), 1, 16), steps=2, people=4, pictures=2), seeds=1, ablations=False
    )
    asked = []
    monkeypatch.setattr(study, "Study", lambda *given: asked.append(given) or whole)
    kept = tmp_path / "kept"
    kept.mkdir()
    results = made_up_results([job for job in whole.jobs() if job not in (whole.default[0][0], whole.harmonic[0][0])])
    for job, arrays in results.items():
        tensors = {name: torch.tensor(array).float() for name, array in arrays.items()}
        write_tensors(kept / f"{job.name()}.safetensors", tensors, {"version": "1"})
    words = ["lab", "faces", "report", "--seeds", "1", "--steps", "2", "--no-ablations", "--workers", "1"]
    words += ["--folder", str(kept)]
    assert main([*words, "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 0
    assert asked == [(protocol.variant(Recipe(), steps=2), 1, False)]
    assert {path.stem for path in kept.glob("*.safetensors")} == {job.name() for job in whole.jobs()}
    assert "4 folds of 10 unseen people" in capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["baselines"]["fisherfaces"]["val_at_far_1e-2"] > found["baselines"]["pixels"]["val_at_far_1e-2"] > 0.4
    assert exit_code(["lab", "faces", "report", "--seeds", "0"]) == 2
