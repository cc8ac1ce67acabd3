"""The command, as a user runs it."""

import json
import subprocess
import sys

import pytest

import linattn
from linattn.cli import main

SMALL = ["compare", "--lengths", "32", "64", "--heads", "2", "--dim", "16", "--seconds", "0.001"]


def test_info_says_what_is_there(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in (linattn.__version__, "torch", "threads", "engine native", "positive, trig"):
        assert word in text
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"]["torch"].startswith("available")


def test_compare_prints_a_table_and_writes_files(capsys, tmp_path):
    files = [tmp_path / "new" / "report.json", tmp_path / "new" / "report.html"]
    assert (
        main(
            [
                *SMALL,
                "--kernels",
                "elu",
                "taylor",
                "softmax",
                "--causal",
                "--json",
                str(files[0]),
                "--html",
                str(files[1]),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    for word in ("tokens", "softmax", "elu", "taylor", "crossover", "growth", "causal, forward"):
        assert word in text
    figures = json.loads(files[0].read_text())
    assert {row["kernel"] for row in figures["rows"]} == {"elu", "taylor", "near/far"}
    assert all(row["seconds"] > 0 and row["baseline_error"] > 0 for row in figures["rows"])
    page = files[1].read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")


def test_compare_times_the_backward_pass(capsys):
    assert main([*SMALL, "--kernels", "relu", "--backward", "--engines", "torch"]) == 0
    assert "forward + backward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "--lengths", "0"], "must be positive"),
        (["compare", "--engines", "abacus"], "engine 'abacus' cannot be used here"),
        (["compare", "--json", "."], "is a folder; name a file"),
    ],
)
def test_mistakes_are_told_before_any_work(words, message):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert message in str(caught.value)


def test_unknown_kernels_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--kernels", "cosine"])
    assert "invalid choice: 'cosine'" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "--backward" in text


def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "linattn", "info"], capture_output=True, text=True, check=True)
    assert "linattn" in done.stdout
