"""The command `run`: documents in, one line each out."""

import io
import json
import sys

import pytest

from cli_support import exit_code
from linattn.cli import main
from linattn_lab.summarize.documents import plain_text


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
        ([str(tmp_path / "good.txt"), "--show-attention", "a.gif"], ".html, .png"),
        ([str(tmp_path / "good.txt"), "--beam", "0"], "at least 1"),
        ([str(tmp_path / "good.txt"), "--kernel", "none"], "unknown kernel"),
        ([str(tmp_path / "good.txt"), "--model", str(tmp_path / "none")], "is not there"),
    ):
        assert exit_code([*run, *words]) == 2
        assert said in capsys.readouterr().err


def test_markdown_is_read_without_its_marks():
    text = (
        "# linattn #\n[![ci](x.svg)](y) <b>Fast</b> `attention` in **linear**\ntime, see [docs](z).\n\n"
        "```sh\npip install\n```\n| a | b |\n| - | - |\n\n- one\n"
    )
    assert plain_text(text) == "linattn\n\nFast attention in linear time, see docs.\n\n- one"


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
