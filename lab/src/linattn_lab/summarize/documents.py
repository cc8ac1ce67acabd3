"""Reads documents: files, folders and standard input; Markdown, reStructuredText and manual pages as plain text."""

import gzip
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .markup import LONGEST, looks_marked, plain_text, reflow
from .pairs import numbered_lines
from .roff import sections

MARKED = (".md", ".markdown", ".rst")
PAGE = re.compile(r"\.[1-9][a-z]*(?:\.gz)?$")  # a manual page by its name
SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
STANDARD_INPUT = Path("-")


@dataclass(frozen=True)
class Document:
    """A text and the kind of pairs that it is most like: see `kinds`."""

    name: str
    text: str
    kind: str = "packages"


def find_files(given: Iterable[Path]) -> list[Path]:
    """The files themselves and all text files under the folders, in order of their names; `-` is standard input."""
    found = []
    for path in given:
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and p.suffix.lower() in SUFFIXES]
            if not inside:
                raise ValueError(f"{path} holds no text files ({', '.join(SUFFIXES)}).")
            found += inside
        elif path == STANDARD_INPUT or path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path} is not there.")
    return found


def read_document(path: Path) -> Document:
    """A document as text; ValueError where it is empty or not UTF-8, with the line."""
    if path == STANDARD_INPUT:
        name = "standard input"
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise ValueError(f"{name}, line {line}: not UTF-8 (byte 0x{error.object[error.start]:02x}).") from error
    elif path.name.endswith(".gz"):
        name = str(path)
        try:
            text = gzip.decompress(path.read_bytes()).decode("utf-8")
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} is no text that gzip has packed ({error}).") from error
    else:
        name = str(path)
        text = "".join(line for _, line in numbered_lines(path))
    text, kind = understood(text, path)
    if not text:
        raise ValueError(f"{name} is empty: there is nothing to summarize.")
    return Document(name, text, kind)


def understood(text: str, path: Path) -> tuple[str, str]:
    """The plain text, and its kind: a manual page's DESCRIPTION, a README, or a text like a package's description.

    Of the first two as much is read as in training; a plain text is read to its end.
    """
    if PAGE.search(path.name) or re.search(r"^\.(?:TH|Dt) ", text, re.MULTILINE):
        described = sections(text).get("DESCRIPTION", "")
        if described:
            return described[:LONGEST], "manuals"
    if path.suffix.lower() in MARKED or looks_marked(text):
        return plain_text(text)[:LONGEST], "readmes"
    return reflow(text), "packages"
