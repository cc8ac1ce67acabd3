"""What the lab's commands share: options, missing extras, progress, and files in folders that are made for them."""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import _files
from .data import DataMissing


class MissingExtra(ImportError):
    """A package of the `lab` extra is not installed."""


def require(*modules: str) -> None:
    """Raises MissingExtra with the command that installs what is missing."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtra(f"{name} is not installed: pip install 'linattn[lab]'") from error


def command(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Turns what a user can put right into one sentence on stderr and exit code 2."""

    @functools.wraps(run)
    def careful(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except BrokenPipeError:
            raise
        except (MissingExtra, DataMissing, ValueError, OSError) as error:
            print(f"linattn: {error}", file=sys.stderr)
            return 2

    return careful


def describe(parser: argparse.ArgumentParser, text: str) -> None:
    """Gives a command a description and examples that keep their lines."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    head, _, examples = text.strip().partition("\nexamples:")
    parser.description = head.strip()
    parser.epilog = "examples:" + examples


def add_common(parser: argparse.ArgumentParser, seed: int = 0) -> None:
    """--json and --seed, the same for every command of the lab."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures for machines")
    parser.add_argument("--seed", type=int, default=seed, help="of everything random (default %(default)s)")


def progress(items: Iterable[Any], **options: Any) -> Iterable[Any]:
    """A progress bar on stderr where stderr is a terminal; the items alone where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, file=sys.stderr, disable=None, leave=False, **options)


def write_json(path: Path, figures: Any) -> None:
    """Figures for machines, in a folder that is made if need be."""
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
        cells = [c.rjust(w) if right[i : i + 1] == "r" else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
