"""Long documents, ROUGE, baselines, and the command `evaluate`."""

import json

import numpy as np
import pytest

from linattn.cli import main
from linattn_lab.summarize.baselines import LEAD, NEAREST, ORACLE, after_verb, baselines, first_full_sentence
from linattn_lab.summarize.evaluation import MODEL
from linattn_lab.summarize.long_documents import lengthened, lengthened_pairs
from linattn_lab.summarize.pairs import Pair, read_folder, write_pairs
from linattn_lab.summarize.rouge import bootstrap, rouge
from linattn_lab.summarize.sentences import inverse_frequency, lexrank, split_sentences, textrank
from linattn_lab.summarize.summarizer import Summarizer


def test_some_documents_are_lengthened_by_others():
    examples = [([10 + i] * 8, [i]) for i in range(200)]
    found = lengthened(examples, 0.5, 64, [3, 3], seed=1)
    assert found == lengthened(examples, 0.5, 64, [3, 3], seed=1) != lengthened(examples, 0.5, 64, [3, 3], seed=2)
    longer = [document for document, _ in found if len(document) > 8]
    assert 60 < len(longer) < 140
    assert max(map(len, longer)) <= 64
    assert any(len(document) > 40 for document in longer)
    assert [(document[:8], summary) for document, summary in found] == examples
    assert longer[0][8:10] == [3, 3]
    assert lengthened(examples, 0, 64, [3, 3]) == examples


def test_test_documents_are_lengthened_by_others(prepared, tmp_path, capsys):
    pairs = [Pair(f"a{i} b{i} c{i}", f"sum {i}") for i in range(9)]
    found = lengthened_pairs(pairs, 10, seed=1)
    assert found == lengthened_pairs(pairs, 10, seed=1)
    assert all(new.document.startswith(old.document + "\n\n") for new, old in zip(found, pairs))
    assert [len(pair.document.split()) for pair in found] == [12] * 9
    assert lengthened_pairs(pairs, 3) == pairs
    out = tmp_path / "said.jsonl"
    words = ["lab", "summarize", "evaluate", "--no-model", "--data", str(prepared), "--lengthen", "99", "--limit", "3"]
    assert main([*words, "--predictions", str(out)]) == 0
    assert all(len(json.loads(line)["document"].split()) >= 99 for line in out.read_text().splitlines())
    assert "lengthened to 99 words" in capsys.readouterr().out


def test_rouge_by_hand():
    # Four words against three: two shared, none in pairs; stems make `runs` and `running` one word.
    found = rouge(["the dog runs fast"], ["running the race"])
    assert found["rouge1"] == pytest.approx(100 * 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))
    assert found["rouge2"] == 0
    assert found["rougeL"] == pytest.approx(100 * 2 * (1 / 4) * (1 / 3) / (1 / 4 + 1 / 3))
    assert rouge(["a b c", "x"], ["a b c", "y"]) == {"rouge1": 50, "rouge2": 50, "rougeL": 50}
    with pytest.raises(ValueError, match="a prediction for each reference"):
        rouge(["x"], [])


def test_the_interval_of_a_mean_by_drawing_pairs_anew():
    each = np.random.default_rng(1).normal(50, 10, (400, 3))
    low, high = bootstrap(each, seed=2)
    mean, error = each.mean(0), each.std(0) / 20
    assert np.allclose(low, mean - 1.96 * error, atol=0.15)
    assert np.allclose(high, mean + 1.96 * error, atol=0.15)
    assert np.array_equal(low, bootstrap(each, seed=2)[0])


def test_each_kind_has_its_own_figures_and_marks(prepared, model, tmp_path, capsys):
    lead = "Screen\n\nScreen is a terminal multiplexer for many screens. It is good."
    assert first_full_sentence(lead) == "Screen is a terminal multiplexer for many screens."
    pairs = [
        Pair(f"{lead} {i}", "terminal multiplexer", kind=kind) for kind in ("manuals", "readmes") for i in range(3)
    ]
    write_pairs(tmp_path / "mine.jsonl", pairs)
    words = ["lab", "summarize", "evaluate", "--no-model", "--pairs", str(tmp_path / "mine.jsonl")]
    assert main([*words, "--data", str(tmp_path), "--limit", "2", "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())["kinds"]
    assert {kind: found["pairs"] for kind, found in figures.items()} == {"manuals": 2, "readmes": 2}
    assert figures["readmes"]["baselines"][LEAD]["rouge1"] > figures["readmes"]["baselines"]["first sentence"]["rouge1"]
    assert main([*words, "--kinds", "docstrings"]) == 2
    assert "no pairs of docstrings" in capsys.readouterr().err
    summarizer = Summarizer.load(model)
    assert summarizer.marked("text", "readmes") == "text"  # it has not learned from such pairs
    summarizer.facts["kinds"] = ["readmes"]
    assert summarizer.marked("text", "readmes") == "readme:\n\ntext"
    assert summarizer.marked("text", "manuals") == "text"


def test_sentences_end_where_they_end():
    text = 'It runs, e.g. on Linux. See "this." Then D. E. Knuth came! 3 more?\n\n* item one\n* item two'
    assert split_sentences(text) == [
        "It runs, e.g. on Linux.",
        'See "this."',
        "Then D. E. Knuth came!",
        "3 more?",
        "* item one",
        "* item two",
    ]
    assert split_sentences("") == [""]


def test_central_sentences_are_those_like_the_others():
    text = "Zebras sleep standing. Zebras fear lions. Lions hunt by night."
    assert textrank(text) == "Zebras fear lions."
    assert lexrank(text, inverse_frequency([text, "other words"])) == "Zebras fear lions."
    assert lexrank("One thing. Another matter.", inverse_frequency(["x"])) == "One thing."
    assert textrank("One.") == "One."


def test_words_after_the_verb():
    text = "GNU Screen is a terminal multiplexer that runs several separate screens. It is good."
    assert after_verb(text) == "a terminal multiplexer that runs several separate screens."
    assert after_verb(text, count=2, article=False) == "terminal multiplexer"
    assert after_verb("This thing. It is good.", count=1) == "This"


def test_baselines_know_the_nearest_and_the_best(prepared):
    splits = read_folder(prepared)
    said = baselines(splits["test"], splits["train"])
    references = [pair.summary for pair in splits["test"]]
    best = rouge(said[ORACLE], references)["rouge1"]
    assert all(best >= rouge(said[name], references)["rouge1"] for name in ("first sentence", "LexRank", "TextRank"))
    assert baselines(splits["train"][:5], splits["train"])[NEAREST] == [pair.summary for pair in splits["train"][:5]]
    assert NEAREST not in baselines(splits["test"], [])


def test_evaluate_prints_and_writes_figures(prepared, model, tmp_path, capsys):
    out, said = tmp_path / "figures.json", tmp_path / "said.jsonl"
    words = [
        "lab",
        "summarize",
        "evaluate",
        "--data",
        str(prepared),
        "--model",
        str(model),
        "--beam",
        "2",
        "--limit",
        "6",
    ]
    published = tmp_path / "published.json"
    assert main([*words, "--json", str(out), "--predictions", str(said), "--figures", str(published)]) == 0
    figures = json.loads(out.read_text())
    found = json.loads(published.read_text())
    for name, of in ((MODEL, figures), ("first sentence", figures["baselines"]["first sentence"])):
        value = found[f"packages|{name}|ROUGE-1"]
        assert value["value"] == round(of["rouge1"], 2)
        assert value["low"] <= value["value"] <= value["high"]
        assert value["seeds"] == [0]
    assert set(figures) == {"rouge1", "rouge2", "rougeL", "pairs", "baselines"}
    assert figures["pairs"] == 6
    assert {"first sentence", "LexRank", "TextRank", NEAREST, ORACLE} <= set(figures["baselines"])
    assert all(set(found) == {"rouge1", "rouge2", "rougeL"} for found in figures["baselines"].values())
    rows = [json.loads(line) for line in said.read_text().splitlines()]
    assert rouge([row["model"] for row in rows], [row["summary"] for row in rows])["rouge1"] == figures["rouge1"]
    assert f"{figures['rouge1']:.2f}" in capsys.readouterr().out


def test_evaluate_takes_any_pairs_and_says_that_nothing_is_near(prepared, model, tmp_path, capsys):
    write_pairs(tmp_path / "mine.jsonl", [Pair("Screen is a multiplexer.", "multiplexer")])
    words = ["lab", "summarize", "evaluate", "--pairs", str(tmp_path / "mine.jsonl"), "--model", str(model)]
    assert main([*words, "--data", str(tmp_path / "nothing"), "--json", str(tmp_path / "f.json")]) == 0
    assert f"{NEAREST}: left out, there are no training pairs" in capsys.readouterr().out
    assert NEAREST not in json.loads((tmp_path / "f.json").read_text())["baselines"]
