"""Training pairs: splits without leaks, statistics, and the command `prepare`."""

import json

import pytest

from linattn.cli import main
from linattn_lab.summarize.pairs import Pair, read_folder, read_pairs, write_pairs
from linattn_lab.summarize.splits import LARGEST_FAMILY, first_paragraph, split_by_source, statistics, unique


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
