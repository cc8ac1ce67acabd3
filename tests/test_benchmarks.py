"""The benchmarks run: small sizes of the cases that take a second or two, and what happens to a case that fails."""

import json
import sys
from pathlib import Path

import pytest

from native_support import needs_native

pytestmark = needs_native
FOLDER = Path(__file__).parents[1] / "benchmarks"
CASES = ["crossover", "decode", "growth", "near/far decode", "near/far recall", "mamba-1", "rules decode"]


@pytest.fixture(scope="module")
def benchmarks():
    """The modules run and registry, as `python benchmarks/run.py` imports them."""
    sys.path.insert(0, str(FOLDER))
    try:
        import registry
        import run

        yield run, registry
    finally:
        sys.path.remove(str(FOLDER))


def read(path):
    found = json.loads(path.read_text())
    return found["cases"], found["failed"]


def test_cases_run_with_small_sizes(benchmarks, tmp_path, capsys):
    run, _ = benchmarks
    assert run.main(["--quick", "--budget", "0.001", "--json", str(tmp_path / "found.json"), "--only", *CASES]) == 0
    cases, failed = read(tmp_path / "found.json")
    assert (list(cases), failed) == (CASES, [])
    for rows in cases.values():
        assert rows
        assert all(row["figure"] >= 0 for row in rows)
    assert "bars met" in capsys.readouterr().out


def test_a_case_that_fails_is_reported_and_the_others_go_on(benchmarks, tmp_path, capsys, monkeypatch):
    run, registry = benchmarks
    run.main(["--list"])  # registers all cases
    cases = dict(registry.CASES)

    def fails(_):
        """Fails after a row."""
        yield registry.Row("before", 1.0, "times", 2.0)
        raise RuntimeError("the reason")

    def works(_):
        """Works."""
        yield registry.Row("after", 3.0, "times", 2.0)

    made = {"fails": registry.Case("fails", "Fails.", fails), "works": registry.Case("works", "Works.", works)}
    monkeypatch.setattr(registry, "CASES", cases | made)
    capsys.readouterr()
    assert run.main(["--only", "fails", "works", "--json", str(tmp_path / "found.json")]) == 1
    shown = capsys.readouterr()
    assert "1 bars met, 1 missed" in shown.out
    assert shown.out.endswith("failed: fails\n")
    assert "the reason" in shown.err
    found, failed = read(tmp_path / "found.json")
    assert {name: [row["met"] for row in rows] for name, rows in found.items()} == {"fails": [False], "works": [True]}
    assert failed == ["fails"]


def test_an_unknown_case_is_an_error(benchmarks, capsys):
    run, _ = benchmarks
    with pytest.raises(SystemExit) as error:
        run.main(["--only", "no such case"])
    assert error.value.code == 2
    assert "no case is called" in capsys.readouterr().err
