"""Debian's package descriptions out of apt's index files."""

import shutil

import pytest

from debian_lists import write_lists
from linattn_lab.data import DataMissing, debian_descriptions
from linattn_lab.summarize.pairs import Pair
from linattn_lab.summarize.splits import split_by_source, statistics, unique


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
