"""Published figures: their files, their tables in the docs, and the command that reruns them."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from cli_support import refusal
from linattn.cli import main
from linattn.cli.parser import build
from linattn_lab.figures import Figure, over_seeds, rerun
from linattn_lab.figures.documents import outdated, table_of, unprinted, with_tables
from linattn_lab.figures.published import Published, read_all, read_published, write_published

DOCS = Path(__file__).parents[3] / "docs" / "lab"
PUBLISHED = read_all(DOCS)
COUNT = {"value": 3.0, "low": 2.0, "high": 4.0, "seeds": [0, 1]}


def test_the_docs_print_what_the_files_say():
    assert [page.name for page in outdated(DOCS, PUBLISHED)] == [], "linattn lab figures --write-docs"
    assert unprinted(DOCS, PUBLISHED) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_command_exists_and_takes_figures(name):
    """A command that was renamed, or an option that is gone, is seen without running it."""
    one = PUBLISHED[name]
    for form in [one, *([one.quick] if one.quick else [])]:
        words = shlex.split(form.command.split("&&")[-1])
        assert words[:2] == ["linattn", "lab"]
        build(tuple(words[1:]))[0].parse_args([*words[1:], "--figures", "figures.json"])
        assert form.minutes > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if one.quick])
def test_the_reduced_forms_give_their_figures(name, tmp_path, capfd):
    words = ["lab", "figures", "--quick", "--only", name, "--docs", str(DOCS), "--json", str(tmp_path / "now.json")]
    assert main(words) == 0, capfd.readouterr().out
    now = json.loads((tmp_path / "now.json").read_text())
    assert set(now["figures"][name]) == set(PUBLISHED[name].quick.figures)


def test_a_figure_moves_when_it_leaves_its_interval():
    figure = Figure(0.878, 0.827, 0.946, (0, 1, 2), ".3f")
    assert not figure.moved(0.83)
    assert figure.moved(0.8)
    assert figure.moved(0.95)
    assert figure.moved(float("nan"))
    exact = Figure(13.18, 13.18, 13.18)
    assert not exact.moved(13.1800001)  # it would be printed alike
    assert exact.moved(13.19)
    assert exact.interval() == "exact"


@pytest.mark.parametrize("numbers", [(1.0, 1.1, 1.2), (float("nan"), 0.0, 1.0), (1.0, 0.0, float("inf"))])
def test_a_figure_outside_of_its_own_interval_is_refused(numbers):
    with pytest.raises(ValueError, match="a figure"):
        Figure(*numbers)


def test_the_interval_over_seeds_is_students():
    figure = over_seeds([1.0, 2.0, 3.0], [0, 1, 2])
    assert (figure.value, figure.seeds) == (2.0, (0, 1, 2))
    assert figure.high - figure.value == pytest.approx(4.302653 / 3**0.5)
    assert over_seeds([0.99, 0.5, 1.0], [0, 1, 2], share=True).high == 1.0
    with pytest.raises(ValueError, match="two values or more"):
        over_seeds([1.0], [0])


def test_tables_of_keys_with_and_without_places():
    figures = {
        "f1": Figure(0.9, 0.8, 1.0, (0, 1, 2, 3)),
        "kinds|pixels|VAL": Figure(0.5, 0.4, 0.6, (0,), ".2f"),
        "kinds|network|VAL": Figure(0.9, 0.8, 0.95, (0, 1, 2), ".2f"),
        "kinds|network|people": Figure(30, 30, 30, (0, 1, 2)),
    }
    assert table_of(figures).splitlines()[2:] == ["| f1 | 0.9 | 0.8 to 1 | 0 to 3 |"]
    assert table_of(figures, "kinds").splitlines() == [
        "| | VAL | people | seeds |",
        "| --- | --- | --- | --- |",
        "| pixels | 0.50 (0.40 to 0.60) |  | 0 |",
        "| network | 0.90 (0.80 to 0.95) | 30 | 0 to 2 |",
    ]


def test_a_page_gets_the_tables_of_its_markers():
    published = {"a": Published("a", "linattn lab x", 1.0, {"f1": Figure(0.9, 0.8, 1.0)})}
    page = "text\n\n<!-- figures: a -->\nold\n<!-- end of figures -->\n\nmore\n"
    anew = with_tables(page, published)
    assert "old" not in anew
    assert "| f1 | 0.9 | 0.8 to 1 | 0 |" in anew
    assert anew.startswith("text\n\n<!-- figures: a -->\n\n|")
    assert anew.endswith("<!-- end of figures -->\n\nmore\n")
    assert with_tables(anew, published) == anew
    for wrong in ("b", "a nothing"):
        with pytest.raises(ValueError, match="figures/"):
            with_tables(page.replace("figures: a", f"figures: {wrong}"), published)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Docs with one command, which a script in place of linattn answers with the figures in answer.json."""
    docs = tmp_path / "docs"
    (docs / "figures").mkdir(parents=True)
    (docs / "page.md").write_text("<!-- figures: counts -->\n<!-- end of figures -->\n")
    write_published(Published("counts", "linattn lab count --to 3", 0.5, {"n": Figure(**COUNT)}), docs)
    write_published(Published("dear", "linattn lab dear", 90.0, {"n": Figure(**COUNT)}), docs)
    write_published(Published("later", "linattn lab later", 2.0), docs)
    script = tmp_path / "answers.py"
    script.write_text(
        "import pathlib, shutil, sys\n"
        f"answer = pathlib.Path({str(tmp_path / 'answer.json')!r})\n"
        "sys.exit('no such data') if not answer.exists() else shutil.copy(answer, sys.argv[-1])\n"
    )
    monkeypatch.setattr(rerun, "LINATTN", (sys.executable, str(script)))

    def run(*words, **answer):
        if answer:
            (tmp_path / "answer.json").write_text(json.dumps({key: {**COUNT, **one} for key, one in answer.items()}))
        return main(["lab", "figures", "--docs", str(docs), *words])

    return docs, run


def test_what_moved_is_named_and_what_is_dear_is_not_run(repository, capfd, tmp_path):
    _, run = repository
    assert run(n={"value": 3.9}) == 0
    shown = capfd.readouterr().out
    assert "dear: not run, 90 minutes of one core: `linattn lab dear`" in shown
    assert "later: nothing published yet, 2 minutes of one core: `linattn lab later`" in shown
    assert "1 figures of 1 commands: 0 moved" in shown
    assert run("--json", str(tmp_path / "out.json"), n={"value": 4.5, "high": 5.0}) == 1
    assert "MOVED" in capfd.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["moved"] == ["counts: n"]
    assert run("--all", m={"value": 3.0}) == 1  # the published figure is missing, twice
    shown = capfd.readouterr().out
    assert "missing" in shown
    assert "not published: m" in shown
    assert "2 moved" in shown


def test_a_command_that_fails_is_said_with_its_last_line(repository, capfd):
    _, run = repository
    assert run("--only", "counts") == 1
    assert "ended with code 1: no such data" in capfd.readouterr().out


def test_recording_publishes_and_writes_the_docs(repository, capfd):
    docs, run = repository
    assert run("--record", "--only", "counts", n={"value": 3.5, "format": ".2f"}) == 0
    assert read_published(docs / "figures/counts.json").figures["n"].text() == "3.50"
    assert run("--write-docs") == 0
    assert "| n | 3.50 | 2.00 to 4.00 | 0, 1 |" in (docs / "page.md").read_text()
    assert unprinted(docs, read_all(docs)) == ["dear: n"]
    assert "no figures 'count'; did you mean 'counts'?" in refusal(
        ["lab", "figures", "--docs", str(docs), "--only", "count"], capfd
    )
    assert "there is no folder" in refusal(["lab", "figures", "--docs", str(docs / "x")], capfd)


def test_a_run_may_be_kept_and_goes_on_there(repository, tmp_path):
    _, run = repository
    assert run("--only", "counts", "--folder", str(tmp_path / "kept"), n={"value": 3.0}) == 0
    assert (tmp_path / "kept/counts/figures.json").is_file()
