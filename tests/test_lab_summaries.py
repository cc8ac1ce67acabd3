"""Summaries: Debian's pairs, vocabulary, ROUGE, baselines, and the commands prepare, evaluate and run."""

import dataclasses
import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.cli import main
from linattn.lab.data import DataMissing, debian_descriptions
from linattn.lab.summarize import looked_at
from linattn.lab.summarize.baselines import NEAREST, ORACLE, after_verb, baselines
from linattn.lab.summarize.documents import Document, plain_text
from linattn.lab.summarize.lengthen import lengthened, lengthened_pairs
from linattn.lab.summarize.model import CONFIGS, ModelConfig, Seq2Seq
from linattn.lab.summarize.pairs import Pair, read_folder, read_pairs, write_pairs
from linattn.lab.summarize.rouge import rouge
from linattn.lab.summarize.sentences import inverse_frequency, lexrank, split_sentences, textrank
from linattn.lab.summarize.splits import LARGEST_FAMILY, first_paragraph, split_by_source, statistics, unique
from linattn.lab.summarize.summarizer import Explanation, Summarizer
from linattn.lab.summarize.tokens import Tokens

PACKAGES = """\
Package: screen
Version: 4.9.0-4
Description: terminal multiplexer

Package: libscreen-dev
Source: screen (4.9.0-3)
Version: 4.9.0-4
"""
TRANSLATION = """\
Package: screen
Description-md5: 2d86b86ed6058a04c540802e49312f40
Description-en: terminal multiplexer  with VT100
 GNU Screen is a terminal multiplexer that runs
 several "screens". It also:
  * logs what
    it sees
  * is many-user
 and more.
 .
 Done.

Package: libscreen-dev
Description-en: terminal multiplexer (headers)
 Headers.

Package: screen-arm
Description-en: of another architecture
 Text.
"""


def write_lists(folder, packages=PACKAGES, translation=TRANSLATION):
    folder.mkdir(exist_ok=True)
    (folder / "mirror_debian_dists_bookworm_main_binary-amd64_Packages").write_text(packages)
    (folder / "mirror_debian_dists_bookworm_main_i18n_Translation-en").write_text(translation)
    return folder


def many_lists(folder, sources=60):
    """Packages of many sources: each has a program and its data; every tenth begins like the one before it."""
    packages, translation = [], []
    for i in range(sources):
        first = f"Tool{i - (i % 10 == 9)} is a fine program for the number {i - (i % 10 == 9)}."
        for name, about in ((f"tool{i}", "the program"), (f"tool{i}-data", "its data")):
            packages.append(f"Package: {name}\nSource: tool{i}\n")
            translation.append(
                f"Package: {name}\nDescription-en: tool for {i}: {about}\n {first}\n .\n Package {i} has {about}.\n"
            )
    return write_lists(folder, "\n".join(packages), "\n".join(translation))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What `prepare` writes, from lists like apt's."""
    folder = tmp_path_factory.mktemp("summaries")
    lists = many_lists(folder / "lists")
    words = ["lab", "summarize", "prepare", "--lists", str(lists), "--out", str(folder / "pairs")]
    assert main([*words, "--validation", "10", "--test", "10", "--vocabulary", "400"]) == 0
    return folder / "pairs"


@pytest.fixture(scope="module")
def model(prepared):
    """A model that has learned nothing, in one file."""
    torch.manual_seed(0)
    tokens = Tokens.load(prepared / "tokens.json")
    config = ModelConfig(vocabulary=tokens.size, **CONFIGS["tiny"])
    path = prepared.parent / "model.safetensors"
    Summarizer(Seq2Seq(config).eval(), tokens, {"model": dataclasses.asdict(config)}).save(path)
    return path


def test_descriptions_are_read_and_cleaned(tmp_path):
    found = {d.package: d for d in debian_descriptions(write_lists(tmp_path))}
    assert found["screen"].synopsis == "terminal multiplexer with VT100"
    assert found["screen"].text == (
        'GNU Screen is a terminal multiplexer that runs several "screens". It also:\n'
        "* logs what it sees\n* is many-user\nand more.\n\nDone."
    )
    assert {name: d.source for name, d in found.items()} == {
        "screen": "screen",
        "libscreen-dev": "screen",
        "screen-arm": "screen-arm",
    }


def test_updates_and_security_are_not_read_twice(tmp_path):
    write_lists(tmp_path)
    other = "Package: late\nDescription-en: x\n y\n"
    (tmp_path / "mirror_debian_dists_bookworm-security_main_i18n_Translation-en").write_text(other)
    assert "late" not in {d.package for d in debian_descriptions(tmp_path)}


def test_damaged_and_missing_lists_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"Translation-en, line 1: a line goes on"):
        debian_descriptions(write_lists(tmp_path / "a", translation=" no field\n"))
    with pytest.raises(ValueError, match=r"Packages, line 2: expected `Field: value`"):
        debian_descriptions(write_lists(tmp_path / "b", packages="Package: x\nnonsense\n"))
    (tmp_path / "c").mkdir()
    with pytest.raises(DataMissing, match="apt-get update -o Acquire::Languages=en"):
        debian_descriptions(tmp_path / "c")


def test_a_machine_without_apt_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DataMissing, match="no apt-get"):
        debian_descriptions()


def test_no_source_and_no_first_paragraph_is_on_two_sides(prepared):
    splits = read_folder(prepared)
    assert {name: len(pairs) for name, pairs in splits.items()} | {"train": 0} == {
        "train": 0,
        "validation": 10,
        "test": 10,
    }
    seen = {name: {pair.source for pair in pairs} for name, pairs in splits.items()}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["test"] & seen["validation"]
    known = {first_paragraph(pair.document) for pair in splits["train"]}
    assert not known & {first_paragraph(pair.document) for pair in splits["test"] + splits["validation"]}
    # Every tenth source begins like its neighbour: such pairs are for training alone.
    assert not {f"tool{i}" for i in range(60) if i % 10 in (8, 9)} & (seen["test"] | seen["validation"])


def family(size=25):
    return [Pair(f"document {i}", f"summary {i}", f"source {i // size}") for i in range(40 * size)]


def test_the_split_follows_the_seed_and_survives_a_change_of_the_index():
    pairs = family(2)
    first = split_by_source(pairs, 20, 20, seed=0)
    assert first == split_by_source(list(pairs), 20, 20, seed=0)
    assert first["test"] != split_by_source(pairs, 20, 20, seed=1)["test"]
    fewer = split_by_source([p for p in pairs if p.source != first["test"][0].source], 20, 20, seed=0)
    assert not set(fewer["test"]) & set(first["train"])


def test_no_family_of_packages_decides_the_figures():
    found = split_by_source(family(25), 30, 30)
    for name in ("validation", "test"):
        sizes = [sum(pair.source == source for pair in found[name]) for source in {p.source for p in found[name]}]
        assert max(sizes) <= LARGEST_FAMILY


def test_too_few_pairs_are_refused_and_repeated_ones_dropped():
    with pytest.raises(ValueError, match="80 pairs leave 0 for train"):
        split_by_source(family(2), 40, 40)
    assert unique([Pair("a", "b", "x"), Pair("a", "b", "y"), Pair(" ", "b"), Pair("a", "c")]) == [
        Pair("a", "b", "x"),
        Pair("a", "c"),
    ]


def test_statistics_count_words_sources_and_new_bigrams():
    pairs = [Pair("One two, three", "two three four", "x"), Pair("one", "one", "x")]
    found = statistics(pairs)
    assert found == {"pairs": 2, "sources": 1, "document_words": 2, "summary_words": 2, "new_bigrams": 0.5}


def test_prepare_twice_gives_the_same_files(prepared, tmp_path, capsys):
    words = ["lab", "summarize", "prepare", "--lists", str(prepared.parent / "lists"), "--out", str(tmp_path / "again")]
    assert (
        main([*words, "--validation", "10", "--test", "10", "--vocabulary", "400", "--json", str(tmp_path / "f")]) == 0
    )
    for path in prepared.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert "new bigrams" in capsys.readouterr().out
    figures = json.loads((tmp_path / "f").read_text())
    assert figures["all"]["pairs"] == 120
    assert figures["all"]["sources"] == 60


def test_prepare_takes_the_users_csv_and_jsonl(tmp_path, capsys):
    rows = "".join(f'"Text, {i}\nof two lines",Summary {i},{i // 2}\n' for i in range(20))
    (tmp_path / "a.csv").write_text("document,summary,source\n" + rows)
    write_pairs(tmp_path / "b.jsonl", [Pair(f"Another {i}", f"sum {i}") for i in range(20)])
    words = ["lab", "summarize", "prepare", str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl"), "--out", str(tmp_path)]
    assert main([*words, "--validation", "5", "--test", "5", "--vocabulary", "300"]) == 0
    splits = read_folder(tmp_path)
    assert Pair("Text, 3\nof two lines", "Summary 3", "1") in [pair for part in splits.values() for pair in part]
    assert main([*words, "--validation", "5", "--test", "50"]) == 2
    assert "lower --validation and --test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"document": "x", "summary": "y"}\n{"document": "x"}\n', r"line 2: no 'summary'"),
        ("a.jsonl", b'{"document": " ", "summary": "y"}\n', r"line 1: the document is empty"),
        ("a.jsonl", b'\n{"document": "x", "summary": 3}\n', r"line 2: 'summary' must be text, got 3"),
        ("a.jsonl", b'{"document": "x"\n', r"line 1: not JSON"),
        ("a.jsonl", b'["x"]\n', r"line 1: expected an object"),
        ("a.jsonl", b'{"document": "x", "summary": "y"}\n{"document": "caf\xe9"}', r"line 2: not UTF-8 \(byte 0xe9"),
        ("a.jsonl", b"", "holds no pairs"),
        ("a.csv", b"document,headline\nx,y\n", r"line 2: no 'summary'; .*got \['document', 'headline'\]"),
        ("a.csv", b'document,summary\n"x\ny",z\na\n', r"line 4: no 'summary'"),
        ("a.csv", b'document,summary\nx,"y" z\n', r"line 2: not CSV"),
        ("a.csv", b"document,summary\nx,y\n\xff,z\n", r"line 3: not UTF-8"),
    ],
)
def test_wrong_pairs_are_named_with_their_line(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said):
        read_pairs(tmp_path / name)


def test_missing_pairs_say_the_command_that_makes_them(tmp_path, capsys):
    assert main(["lab", "summarize", "evaluate", "--no-model", "--data", str(tmp_path)]) == 2
    assert f"`linattn lab summarize prepare --out {tmp_path}`" in capsys.readouterr().err
    assert main(["lab", "summarize", "evaluate", "--no-model", "--pairs", str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl is not there" in capsys.readouterr().err


VOCABULARY = Tokens.train(["A terminal multiplexer.\nA thing, the <end> of it."] * 4, 300)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")))
def test_every_text_comes_back(text):
    text = "\n".join(line.strip() for line in text.strip().split("\n"))
    numbers, spans = VOCABULARY.offsets(text)
    assert VOCABULARY.decode(numbers) == text
    assert VOCABULARY.encode_many([text]) == [numbers] == [VOCABULARY.encode(text)]
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    assert min(numbers, default=3) >= 3


def test_a_word_is_the_same_token_wherever_it_stands():
    first, middle, line = (VOCABULARY.encode(text) for text in ("thing", "A thing", "A\nthing"))
    assert first == middle[-len(first) :] == line[-len(first) :]


def test_a_vocabulary_is_saved_and_learned_alike(tmp_path):
    VOCABULARY.save(tmp_path / "tokens.json")
    assert Tokens.load(tmp_path / "tokens.json").to_json() == VOCABULARY.to_json()
    again = Tokens.train(["A terminal multiplexer.\nA thing, the <end> of it."] * 4, 300)
    assert again.to_json() == VOCABULARY.to_json()
    assert (VOCABULARY.pad, VOCABULARY.start, VOCABULARY.end) == (0, 1, 2)
    with pytest.raises(ValueError, match="256 bytes"):
        Tokens.train(["x"], 100)


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
    assert main([*words, "--json", str(out), "--predictions", str(said)]) == 0
    figures = json.loads(out.read_text())
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


def test_run_reads_files_folders_and_standard_input(model, tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text("Screen is a\nterminal multiplexer.")
    (tmp_path / "b.md").write_text("# Title\n\nA tool.\n")
    (tmp_path / "c.bin").write_bytes(b"\0")
    run = ["lab", "summarize", "run", "--model", str(model), "--max-tokens", "5"]
    assert main([*run, str(tmp_path / "a.txt")]) == 0
    alone = capsys.readouterr().out
    assert alone.count("\n") == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Screen is a terminal multiplexer.")))
    assert main(run) == 0
    assert capsys.readouterr().out == alone
    assert main([*run, str(tmp_path), "--json", str(tmp_path / "lines.json")]) == 0
    assert f"{tmp_path / 'a.txt'}: {alone}" in capsys.readouterr().out
    lines = json.loads((tmp_path / "lines.json").read_text())
    assert list(lines) == [str(tmp_path / "a.txt"), str(tmp_path / "b.md")]


def test_run_draws_by_chance_as_the_seed_says(model, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Screen is a terminal multiplexer.")
    run = ["lab", "summarize", "run", "--model", str(model), str(tmp_path / "a.txt"), "--temperature", "1", "--seed"]
    said = [(main([*run, seed]), capsys.readouterr().out)[1] for seed in ("3", "3", "4")]
    assert said[0] == said[1] != said[2]


def test_run_names_what_it_cannot_read_and_goes_on(model, tmp_path, capsys, monkeypatch):
    run = ["lab", "summarize", "run", "--model", str(model), "--max-tokens", "5"]
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"fine\ncaf\xe9\n")
    assert main([*run, str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "empty.txt is empty" in err
    assert "latin.txt, line 2: not UTF-8 (byte 0xe9 at column 4)" in err
    (tmp_path / "good.txt").write_text("Screen is a multiplexer.")
    assert main([*run, str(tmp_path)]) == 1
    assert "good.txt: " in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff")))
    assert main([*run, "-"]) == 2
    assert "standard input, line 2: not UTF-8" in capsys.readouterr().err
    for words, said in (
        ([str(tmp_path / "none")], "is not there"),
        ([str(tmp_path / "good.txt"), "--show-attention", "a.gif"], ".html or .png"),
        ([str(tmp_path / "good.txt"), "--beam", "0"], "at least 1"),
        ([str(tmp_path / "good.txt"), "--kernel", "none"], "unknown kernel"),
        ([str(tmp_path / "good.txt"), "--model", str(tmp_path / "none")], "is not there"),
    ):
        assert main([*run, *words]) == 2
        assert said in capsys.readouterr().err


def test_markdown_is_read_without_its_marks():
    text = (
        "# linattn #\n[![ci](x.svg)](y) <b>Fast</b> `attention` in **linear**\ntime, see [docs](z).\n\n"
        "```sh\npip install\n```\n| a | b |\n| - | - |\n\n- one\n"
    )
    assert plain_text(text) == "linattn\n\nFast attention in linear time, see docs.\n\n- one"


EXPLAINED = Explanation(
    summary="terminal tool",
    output=["termin", "al", "tool"],
    source=[(0, 1), (1, 7), (7, 10), (10, 11)],
    attention=torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.1, 0.4, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]),
    copy=torch.tensor([0.5, 1.0, 0.0]),
)
SOURCE = Document("x", "A termi</b>.")


def test_tokens_are_gathered_into_words():
    first, second = looked_at.looks(EXPLAINED, SOURCE.text)
    assert (first.text, first.copy, second.text, second.copy) == ("terminal", 0.75, "tool", 0.0)
    assert first.words == pytest.approx({0: 0.1, 1: 0.9})
    assert second.words == {0: 1.0}


def test_half_characters_stay_with_their_word():
    assert looked_at.output_words("über x", ["\ufffd", "\ufffd", "ber", "x"]) == [("über", [0, 1, 2]), ("x", [3])]


def test_the_page_escapes_its_texts_and_its_script_is_sound(tmp_path):
    looked_at.draw(EXPLAINED, SOURCE, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "<span>A</span> <span>termi&lt;/b&gt;.</span>" in page
    script = page.partition("<script>")[2].partition("</script>")[0]
    assert '"text": "terminal"' in script
    if shutil.which("node"):
        done = subprocess.run(["node", "--check", "-"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_run_shows_what_it_looked_at(model, tmp_path, suffix, capsys):
    (tmp_path / "a.txt").write_text("Screen costs $5 and is a terminal multiplexer.")
    path = tmp_path / "out" / f"looked.{suffix}"
    run = ["lab", "summarize", "run", "--model", str(model), "--max-tokens", "6", str(tmp_path / "a.txt")]
    assert main([*run, "--show-attention", str(path)]) == 0
    assert path.read_bytes()[:15] == (b"<!doctype html>" if suffix == "html" else b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHD")
    drawn = capsys.readouterr().out
    assert main(run) == 0
    assert capsys.readouterr().out == drawn
    (tmp_path / "b.txt").write_text("Another.")
    assert main([*run, str(tmp_path / "b.txt"), "--show-attention", str(path)]) == 2
    assert "draws one document, got 2" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_index_gives_the_pairs_it_is_known_for():
    try:
        found = debian_descriptions()
    except DataMissing as error:
        pytest.skip(f"Debian's index cannot be fetched here: {error}")
    pairs = unique(Pair(d.text, d.synopsis, d.source, d.package) for d in found)
    if len(pairs) < 10000:
        pytest.skip(f"apt's sources here hold only {len(pairs)} descriptions")
    figures = statistics(pairs)
    assert 35 <= figures["document_words"] <= 55
    assert 5 <= figures["summary_words"] <= 9
    assert 0.55 <= figures["new_bigrams"] <= 0.75
    assert not any(pair.document.startswith(".") or "\n .\n" in pair.document for pair in pairs)
    splits = split_by_source(pairs, 1500, 1500)
    assert len(splits["test"]) == len(splits["validation"]) == 1500
