"""Pairs of document and summary: JSONL or CSV files, and the folder of train, validation and test."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linattn._files import write_text

from ..data import DataMissing, cache_folder

FIELDS = ("document", "summary", "source", "package", "kind")
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Pair:
    """A document and its summary. Pairs of one source are siblings, and stay on one side of a split.

    kind: which of KINDS it is, if any; package: what it was taken from, for people.
    """

    document: str
    summary: str
    source: str = ""
    package: str = ""
    kind: str = ""


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a .jsonl file (an object a line) or a .csv file (a heading) with document and summary.

    What is wrong is named with its line: ValueError.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there.")
    rows = _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path)
    found = []
    for number, row in rows:
        values = {name: row.get(name, "") for name in FIELDS}
        for name, value in values.items():
            if name in ("document", "summary") and name not in row:
                raise ValueError(
                    f"{path}, line {number}: no {name!r}; each pair needs 'document' and 'summary', got {sorted(row)}."
                )
            if not isinstance(value, str):
                raise ValueError(f"{path}, line {number}: {name!r} must be text, got {value!r}.")
            if name in ("document", "summary") and not value.strip():
                raise ValueError(f"{path}, line {number}: the {name} is empty.")
        found.append(Pair(**values))
    if not found:
        raise ValueError(f"{path} holds no pairs.")
    return found


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """A JSONL file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs))


def data_folder() -> Path:
    """Where `prepare` puts the pairs, and the other commands look for them, unless told otherwise."""
    return cache_folder() / "summarize"


def read_folder(folder: Path) -> dict[str, list[Pair]]:
    """What `prepare` wrote: the pairs of train, validation and test."""
    return {name: read_split(folder, name) for name in SPLITS}


def read_split(folder: Path, name: str) -> list[Pair]:
    """The pairs of one split, or DataMissing with the command that makes them."""
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        chosen = "" if folder == data_folder() else f" --out {folder}"
        raise DataMissing(f"{path} is missing: make it with `linattn lab summarize prepare{chosen}`.")
    return read_pairs(path)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that must be UTF-8, numbered from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}); "
                    "convert it, for instance with `iconv -f latin1 -t utf-8`."
                ) from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}).") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected an object with document and summary, got {row!r:.60}.")
        yield number, row


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader((line for _, line in numbered_lines(path)), strict=True)
    heading: list[str] | None = None
    while True:
        number = reader.line_num + 1  # a quoted document may go over many lines: name the one that it begins on
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {number}: not CSV ({error}).") from error
        if row is None:
            return
        if heading is None:
            heading = row
        elif row:
            yield number, dict(zip(heading, row, strict=False))
