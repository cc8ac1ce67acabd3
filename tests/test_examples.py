"""The examples run, and the model in them writes what it would have been taught."""

import importlib.util
from pathlib import Path

import torch

import warm_python

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny_language_model.py"


def test_the_language_model_trains_and_writes():
    done = warm_python.run(str(EXAMPLE), "--steps", "3", "--length", "64", "--write", "20", check=True)
    assert "step     3  loss" in done.stdout


def test_writing_with_a_state_equals_reading_everything_again():
    spec = importlib.util.spec_from_file_location("tiny_language_model", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.LanguageModel(11, dim=32, heads=2, layers=2).double()
    tokens = torch.randint(11, (1, 80))
    whole, _ = model(tokens)
    logits, states = model(tokens[:, :70])
    for t in range(70, 80):
        step, states = model(tokens[:, t : t + 1], states)
        logits = torch.cat([logits, step], 1)
    assert torch.allclose(logits, whole, atol=1e-9)


def test_every_update_rule_trains(tmp_path):
    """A few steps of each; the table has a row for each, and the plot is written."""
    script, plot = EXAMPLE.parent / "update_rules.py", tmp_path / "plot.png"
    words = ["--steps", "2", "--length", "32", "--batch", "2", "--plot", str(plot)]
    done = warm_python.run(str(script), *words, check=True)
    for rule in ("softmax", "retention", "lightning", "gla", "mamba2", "deltanet", "kda"):
        assert f"| {rule} |" in done.stdout
    assert plot.exists() == ("no plot" not in done.stdout)
