"""linattn lab figures: runs the commands behind the docs' figures anew and says what moved."""

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...commandline import add_output, describe, did_you_mean, real, require, table, write_json

if TYPE_CHECKING:
    from ..published import Published
    from ..rerun import Row

HELP = """
Every figure that the pages of the lab print is in a file docs/lab/figures/NAME.json, with its interval, its seeds and the
command that printed it. This runs those commands anew, in an empty folder where nothing is cached, and prints each
published figure beside the one of now. A figure moved if it is outside of its published 95 % interval. Exits with 1 if
one moved or a command failed.

Commands that take more than --limit minutes of one core are named and left out. --quick runs the reduced forms, some
seconds in all. --record runs a command and publishes what it prints; --write-docs copies the files into the tables of
the pages (between the markers `figures: NAME` and `end of figures`).

examples:
  linattn lab figures                          # all up to 30 minutes each
  linattn lab figures --only questions purify
  linattn lab figures --all --json moved.json
  linattn lab figures --record --only questions && linattn lab figures --write-docs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these files alone, whatever they take")
    parser.add_argument(
        "--limit", type=real(0), default=30.0, help="minutes of one core that a command may take (default %(default)s)"
    )
    parser.add_argument("--all", action="store_true", help="every command, however long it takes")
    parser.add_argument("--quick", action="store_true", help="the reduced forms")
    parser.add_argument("--record", action="store_true", help="publish what the commands print now")
    parser.add_argument("--write-docs", action="store_true", help="only make the tables of the pages anew")
    parser.add_argument(
        "--folder", type=Path, help="run there and keep what is made, so that a stopped run continues (default: anew)"
    )
    parser.add_argument(
        "--docs", type=Path, default=Path("docs/lab"), help="pages and figures/*.json (default %(default)s)"
    )
    add_output(parser, "--json", "write the comparison for machines")


def run(args: argparse.Namespace) -> int:
    require("numpy", "scipy")
    from ..published import read_all

    published = read_all(args.docs)
    unknown = [name for name in args.only or [] if name not in published]
    if unknown:
        hint = did_you_mean(unknown[0], published) or f": there are {', '.join(published) or 'none'}."
        raise ValueError(f"no figures {unknown[0]!r}{hint}")
    if args.write_docs:
        return _write_docs(args.docs)
    found: dict[str, list[Row]] = {}
    failed = []
    for name, one in published.items():
        wanted = name in args.only if args.only else True
        chosen = one.quick if args.quick else one
        if not wanted or chosen is None:
            continue
        if not (chosen.figures or args.record):
            print(f"{name}: nothing published yet, {chosen.minutes:g} minutes of one core: `{chosen.command}`\n")
            continue
        if not (args.all or args.only or chosen.minutes <= args.limit):
            print(f"{name}: not run, {chosen.minutes:g} minutes of one core: `{chosen.command}`\n")
            continue
        print(f"{name}: `{chosen.command}` ({chosen.minutes:g} minutes of one core)", flush=True)
        try:
            found[name] = _run_one(one, chosen, args)
        except RuntimeError as error:
            print(f"failed: {error}\n")
            failed.append(name)
    moved = [f"{name}: {row.key}" for name, rows in found.items() for row in rows if row.moved]
    print(f"{sum(map(len, found.values()))} figures of {len(found)} commands: {len(moved)} moved")
    for line in [*moved, *(f"{name}: failed" for name in failed)]:
        print(f"  {line}")
    if args.json:
        facts = {name: {row.key: _facts(row) for row in rows} for name, rows in found.items()}
        write_json(args.json, {"figures": facts, "moved": moved, "failed": failed})
        print(f"wrote {args.json}")
    return 1 if failed or (moved and not args.record) else 0


def _run_one(one: "Published", chosen: "Published", args: argparse.Namespace) -> "list[Row]":
    """Runs a command, prints the comparison, and with --record publishes what came."""
    from ..published import write_published
    from ..rerun import compare, rerun, unpublished

    with _place(args.folder, one.name) as folder:
        now, minutes = rerun(chosen, folder)
    rows = compare(chosen.figures, now)
    for key in unpublished(chosen.figures, now):
        print(f"  not published: {key}")
    if rows:
        print(table([["figure", "published", "95 %", "now", "moved"], *map(_cells, rows)], " rrrr"))
    print(f"{minutes:.2f} minutes of one core\n", flush=True)
    if args.record:
        chosen.figures, chosen.minutes = now, round(minutes, 2)
        print(f"wrote {write_published(one, args.docs)}\n")
    return rows


def _cells(row: "Row") -> list[str]:
    now = "missing" if row.now is None else row.published.text(row.now)
    return [row.key, row.published.text(), row.published.interval(), now, "MOVED" if row.moved else "no"]


def _facts(row: "Row") -> dict[str, object]:
    return {"published": row.published.facts(), "now": row.now, "moved": row.moved}


@contextlib.contextmanager
def _place(kept: Path | None, name: str) -> Iterator[Path]:
    """A folder to run in: one that is kept, or a fresh one that is removed."""
    if kept is not None:
        yield kept / name
        return
    folder = Path(tempfile.mkdtemp(prefix=f"linattn-{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_docs(docs: Path) -> int:
    from linattn._files import write_text

    from ..documents import outdated
    from ..published import read_all

    found = outdated(docs, read_all(docs))
    for page, text in found.items():
        write_text(page, text)
        print(f"wrote {page}")
    if not found:
        print("every page prints what its figures say")
    return 0
