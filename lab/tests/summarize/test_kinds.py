"""Manual pages, docstrings and READMEs as pairs, and one split for all kinds."""

import gzip
import io
import json
import subprocess
import tarfile
import zipfile

import pytest

from debian_lists import many_lists
from linattn.cli import main
from linattn_lab.data import Package, manuals, projects
from linattn_lab.summarize import kinds
from linattn_lab.summarize.documents import read_document
from linattn_lab.summarize.manual_pages import page_pair
from linattn_lab.summarize.manual_sources import manual_packages, rich_packages
from linattn_lab.summarize.markup import LONGEST, looks_marked, plain_text
from linattn_lab.summarize.mixture import mixture
from linattn_lab.summarize.pairs import read_folder
from linattn_lab.summarize.splits import first_paragraph
from linattn_lab.summarize.wheel_texts import docstring_pair, metadata_pair, wheel_docstrings, wheel_readme

MAN = r"""
.\" Made by hand
.de Vb
ignored \\$1
..
.TH FROB 1 "2020"
.SH NAME
frob, unfrob \- turn \fIfrobs\fR into \(lqbars\(rq
.SH SYNOPSIS
.B frob
[\-x]
.SH "DESCRIPTION"
.B frob
reads
.IR file ,
and writes each frob
.RB ( \-x
for all) as a bar.
.nf
frob --all | wc
.fi
.PP
See
.BR bar (1)
for what a bar is\&.
.SH OPTIONS
None.
"""
MDOC = r"""
.Dd January 1, 2020
.Dt FROB 8
.Sh NAME
.Nm frob
.Nd turn frobs into bars
.Sh DESCRIPTION
The
.Nm
utility turns frobs into
.Dq bars ,
one for each line of
.Ar file .
With
.Fl x
it works on all of them.
See
.Xr bar 1 .
"""
README = """\
<h1 align="center">frob</h1>
<!-- hidden -->
[![build](https://x/y.svg)](https://x) :rocket:

[English](a.md) \u2022 [Deutsch](b.md)
\u2022 [more](c.md)

<b>English</b> |
<a href="x">Deutsch</a> | <a href="y">more</a> | <a href="z">most</a>

**Frob** turns `frobs` into *bars*, _fast_, as [Unix] does, see [the docs](https://x/(y)) or https://x/z.

## Installation

Run this:

    pip install frob

## Why?

> Because bars &amp; frobs differ.

```python
frob.run()
```

| a | b |
|---|---|
"""
RST = """\
====
frob
====

.. image:: https://x/y.svg
   :target: https://x

|badge| |other|

Frob turns ``frobs`` into :class:`~frob.Bar` objects, see `the docs <https://x>`_::

    frob.run()

License
-------

MIT
"""


def test_a_manual_page_is_its_description_and_its_name_line():
    document, summary = page_pair(MAN)
    assert summary == 'turn frobs into "bars"'
    assert document == ("frob reads file, and writes each frob (-x for all) as a bar.\n\nSee bar(1) for what a bar is.")
    document, summary = page_pair(MDOC)
    assert summary == "turn frobs into bars"
    assert document == (
        'The frob utility turns frobs into "bars", one for each line of file. With -x it works on all of them. See bar(1).'
    )
    assert page_pair(MAN.replace(r"\-", "of", 1)) is None  # no dash
    assert page_pair(".SH NAME\na \\- b c\n.SH DESCRIPTION\nShort.\n") is None


def test_markup_is_read_without_what_only_a_browser_shows():
    assert plain_text(README) == (
        "frob\n\nFrob turns frobs into bars, fast, as Unix does, see the docs or\n\nWhy?\n\nBecause bars & frobs differ."
    )
    assert plain_text(RST) == "frob\n\nFrob turns frobs into frob.Bar objects, see the docs:"
    assert looks_marked(README)
    assert looks_marked(RST)
    assert not looks_marked("A plain text.\nWith a line - or two - and #hash.\n\n* item")


def test_a_docstring_is_what_follows_its_first_line():
    rest = "Each of them is turned once, in the order of the file that they stand in.\n\n"
    found = docstring_pair(f"Turn all frobs into bars.\n\n    {rest}    Args:\n        x: a frob.\n")
    assert found == (rest.strip(), "Turn all frobs into bars")
    assert docstring_pair(f"Turn all frobs\ninto bars.\n\n{rest}") is None  # the first line does not stand alone
    assert (
        docstring_pair("Turn all frobs into bars.\n\nArgs:\n    x: a frob that is turned, whatever it may be.") is None
    )
    assert docstring_pair(f"x = frob(y[0], **z)\n\n{rest}") is None


def write_wheel(folder, name, summary, modules=1):
    text = f"It keeps the {name} of every line, and does so for as long as the file is open and not moved."
    path = folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nSummary: {summary}\n\n# {name}\n\n{text}\n")
        for i in range(modules):
            code = f'"""The {name} number {i} of all.\n\n{text} Number {i}.\n"""\nraise SystemExit("never run")\n'
            wheel.writestr(f"{name}/m{i}.py", code)
        wheel.writestr(f"{name}/tests/a.py", f'"""A test of all things.\n\n{text}"""')
        wheel.writestr(f"{name}/template.py", "{{ not python }}")
    return path


def test_a_wheel_is_read_and_never_run(tmp_path):
    path = write_wheel(tmp_path, "frob-lib", "A library for frobs.", modules=3)
    document, summary = wheel_readme(path)
    assert summary == "A library for frobs"
    assert document.startswith("frob-lib\n\nIt keeps")
    assert [pair[1] for pair in wheel_docstrings(path)] == [f"The frob-lib number {i} of all" for i in range(3)]
    assert len(wheel_docstrings(path, most=2)) == 2
    old = b"Name: x\nSummary: One two three\nDescription: Title\n        \n        " + b"word " * 12 + b"\n\n"
    assert metadata_pair(old) == ("Title\n\n" + "word " * 11 + "word", "One two three")
    assert metadata_pair(b"Name: x\nSummary: One two three\n\nToo short.") is None


def test_small_packages_of_validation_and_test_are_all_taken():
    index = {f"p{i}": Package(f"p{i}", f"s{i}", "utils", 1000) for i in range(3000)}
    index |= {"big": Package("big", "s0", "utils", 10**7), "lib": Package("lib", "s0", "libs", 1)}
    index["manpages"] = Package("manpages", "manpages", "doc", 10**7)
    sides = {f"s{i}": "test" if i < 100 else "train" for i in range(3000)}
    found = manual_packages(index, sides)
    assert found[0] == "manpages"
    assert set(found) >= {f"p{i}" for i in range(100)}
    assert len(found) == 1 + 100 + 1000
    assert not {"big", "lib"} & set(found)
    assert found == manual_packages(index, sides)
    assert len(rich_packages()) == len(set(rich_packages()))


def test_projects_are_named_once_and_held_out_ones_are_not_among_them():
    names = kinds.projects()
    assert len(names) == len(set(names)) > 1000
    assert all(name == projects.normal_name(name) for name in names)
    assert not set(names) & set(kinds.HELD_OUT)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """What `prepare` writes of all kinds, from lists, pages and wheels that are here already."""
    folder = tmp_path_factory.mktemp("mixed")
    lists = many_lists(folder / "lists")
    fetched = folder / "fetched"
    (fetched / "manuals").mkdir(parents=True)
    (fetched / "wheels").mkdir()
    for i in range(60):
        pages = {f"tool{i}.{j}": MAN.replace("frob", f"tool{i}x{j}") for j in (1, 8)}
        (fetched / "manuals" / f"tool{i}.json").write_text(json.dumps(pages))
        write_wheel(fetched / "wheels", f"tool{i}", f"A library for number {i}.")
    for i in range(20):  # not in Debian
        write_wheel(fetched / "wheels", f"other{i}", f"Another library for number {i}.")
    patch = pytest.MonkeyPatch()
    packages = [f"tool{i}" for i in range(60)]
    patch.setattr(kinds, "manual_packages", lambda index, sides: packages)
    patch.setattr(kinds, "projects", lambda: [*packages, *(f"other{i}" for i in range(20))])
    words = ["lab", "summarize", "prepare", "--kinds", *kinds.KINDS, "--lists", str(lists), "--fetched", str(fetched)]
    words += ["--out", str(folder / "pairs"), "--validation", "5", "--test", "5", "--vocabulary", "400"]
    assert main([*words, "--json", str(folder / "figures.json")]) == 0
    patch.undo()
    return folder / "pairs"


def test_a_source_has_one_side_in_all_kinds(mixed):
    splits = read_folder(mixed)
    sources = {name: {pair.source for pair in pairs} for name, pairs in splits.items()}
    assert not sources["train"] & (sources["test"] | sources["validation"])
    assert not sources["test"] & sources["validation"]
    for name in ("validation", "test"):
        assert {kind: sum(pair.kind == kind for pair in splits[name]) for kind in kinds.KINDS} == dict.fromkeys(
            kinds.KINDS, 5
        )
        first = {first_paragraph(pair.document) for pair in splits[name]}
        assert not first & {first_paragraph(pair.document) for pair in splits["train"]}
    figures = json.loads((mixed.parent / "figures.json").read_text())
    assert set(figures) == set(kinds.KINDS)
    assert figures["readmes"]["all"]["pairs"] == 80


def test_a_debian_source_is_found_by_the_projects_name():
    index = {"python3-yaml": Package("python3-yaml", "pyyaml", "python", 1), "tox": Package("tox", "tox", "python", 1)}
    sources = {"pyyaml", "tox", "python-attrs"}
    found = [kinds.debian_source(name, index, sources) for name in ("yaml", "pyyaml", "tox", "attrs", "polars")]
    assert found == ["pyyaml", "pyyaml", "tox", "python-attrs", "polars"]


def test_shares_of_kinds():
    given = ["packages"] * 90 + ["readmes"] * 10
    places = mixture(given, {"packages": 0.5, "readmes": 0.5}, seed=1)
    assert places == mixture(given, {"packages": 0.5, "readmes": 0.5}, seed=1)
    assert sum(given[place] == "readmes" for place in places) == 50
    assert sorted(place for place in places if place >= 90) == sorted(list(range(90, 100)) * 5)
    assert len({place for place in places if place < 90}) == 50
    with pytest.raises(ValueError, match="no pairs of manuals"):
        mixture(given, {"manuals": 1})


def test_documents_are_known_by_their_looks(tmp_path):
    (tmp_path / "README").write_text(README)
    with gzip.open(tmp_path / "frob.1.gz", "wt") as file:
        file.write(MAN)
    (tmp_path / "plain.txt").write_text("Frob is a tool.\n")
    found = {name: read_document(tmp_path / name) for name in ("README", "frob.1.gz", "plain.txt")}
    assert {name: document.kind for name, document in found.items()} == {
        "README": "readmes",
        "frob.1.gz": "manuals",
        "plain.txt": "packages",
    }
    assert found["frob.1.gz"].text.startswith("frob reads file")
    (tmp_path / "long.md").write_text("# Title\n\n" + "word " * 2000)
    assert len(read_document(tmp_path / "long.md").text) == LONGEST
    (tmp_path / "bad.gz").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"bad\.gz is no text"):
        read_document(tmp_path / "bad.gz")


def test_pages_come_out_of_a_package_and_are_not_fetched_twice(tmp_path, monkeypatch):
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as opened:
        for name, data in (
            ("./usr/share/man/man1/frob.1.gz", gzip.compress(MAN.encode())),
            ("./usr/share/man/de/man1/frob.1.gz", b"German"),
            ("./usr/bin/frob", b"program"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            opened.addfile(entry, io.BytesIO(data))
    asked = []

    def download(packages, target, state):
        asked.append(list(packages))
        return [(name, target / f"{name}.deb") for name in packages]

    def run(words, **_):
        return subprocess.CompletedProcess(words, 0, tar.getvalue(), b"")

    monkeypatch.setattr(manuals, "download_debs", download)
    monkeypatch.setattr(manuals.subprocess, "run", run)
    manuals.fetch_manuals(["frob"], tmp_path)
    manuals.fetch_manuals(["frob", "other"], tmp_path)
    assert asked == [["frob"], ["other"]]
    found = manuals.read_manuals(["frob", "none"], tmp_path)
    assert found == {"frob": {"frob.1": MAN}}


def test_a_wheel_that_pip_does_not_find_does_not_stop_the_others(tmp_path, monkeypatch):
    asked = []

    def run(words, **_):
        names = words[words.index(str(tmp_path)) + 1 :]
        asked.append(names)
        if "nothing" in names:
            return subprocess.CompletedProcess(words, 1, "", "ERROR: No matching distribution found for nothing\n")
        for name in names:
            (tmp_path / f"{name.replace('-', '_')}-1.0-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(projects.subprocess, "run", run)
    assert projects.fetch_wheels(["A_b", "nothing", "c"], tmp_path) == ["nothing"]
    assert asked == [["a-b", "nothing", "c"], ["a-b", "c"]]
