"""Shared by the lab's commands: options, missing packages, progress bars, output files, text tables."""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from linattn import _commandline, _files
from linattn._commandline import PLOT_SUFFIXES, MissingExtra, add_output, did_you_mean, real, seed, whole

T = TypeVar("T")
__all__ = [
    "PLOT_SUFFIXES",
    "MissingExtra",
    "add_common",
    "add_output",
    "describe",
    "did_you_mean",
    "progress",
    "real",
    "require",
    "seed",
    "seed_list",
    "table",
    "whole",
    "write_file",
    "write_json",
]


def require(*modules: str) -> None:
    """Imports the modules; raises MissingExtra with the pip command if one is not installed."""
    _commandline.require(*modules, requirement="linattn-lab")


def describe(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds a description and examples below the one-line summary of a command."""
    head, _, examples = text.strip().partition("\nexamples:")
    parser.description = f"{parser.description}\n\n{head.strip()}" if parser.description else head.strip()
    parser.epilog = "examples:" + examples


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds --json and --seed."""
    add_output(parser, "--json", "write the figures for machines")
    parser.add_argument("--seed", type=seed, default=0, help="of everything random")


def seed_list(text: str) -> list[int]:
    """An argparse type: seeds as a list and ranges, e.g. 0-9 or 0,3,5-7."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = seed(first), seed(last if dash else first)
        if high < low:
            raise argparse.ArgumentTypeError(f"a range goes from low to high, got {part!r}")
        if high - low >= 1000:
            raise argparse.ArgumentTypeError(f"at most 1000 seeds in a range, got {part!r}")
        found += range(low, high + 1)
    return list(dict.fromkeys(found))


def progress(items: Iterable[T], **options: object) -> Iterable[T]:
    """The items with a progress bar on stderr, if stderr is a terminal. `options` are tqdm's."""
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, file=sys.stderr, disable=None, leave=False, **options)
    return bar


def write_json(path: Path, figures: object) -> None:
    """Figures as JSON, in a folder that is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.write_json(path, figures)


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.write_file(path, write)


def table(rows: list[list[str]], right: str = "") -> str:
    """Text in columns; the first row is the heading, and columns named in `right` (as 'r' by place) align right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if right[i : i + 1] == "r" else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
