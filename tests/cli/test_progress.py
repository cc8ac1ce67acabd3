"""The progress bar of long commands."""

import io
import sys

import pytest

from linattn.cli.progress import progress

LABELS = ["elu 256", "elu 512"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_label_and_count_and_is_clean_afterwards(monkeypatch):
    pytest.importorskip("tqdm")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    assert list(progress(LABELS)) == LABELS
    assert "0/2" in shown.getvalue()
    assert all(label in shown.getvalue() for label in LABELS)
    assert shown.getvalue().endswith("\r")
    assert shown.getvalue().rstrip("\r").split("\r")[-1].strip() == ""


def test_a_bar_that_is_left_early_is_cleared(monkeypatch):
    pytest.importorskip("tqdm")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = progress(LABELS)
    assert next(bar) == LABELS[0]
    bar.close()
    assert shown.getvalue().rstrip("\r").split("\r")[-1].strip() == ""


def test_nothing_is_shown_elsewhere_or_without_tqdm(monkeypatch, capsys):
    assert list(progress(LABELS)) == LABELS
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    assert list(progress(LABELS)) == LABELS
    assert shown.getvalue() == capsys.readouterr().err == ""
