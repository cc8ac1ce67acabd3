"""Reads documents: files, folders and standard input; Markdown as plain text."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .pairs import numbered_lines

SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
STANDARD_INPUT = Path("-")


@dataclass(frozen=True)
class Document:
    name: str
    text: str


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
    else:
        name = str(path)
        text = "".join(line for _, line in numbered_lines(path))
    text = plain_text(text) if path.suffix.lower() in (".md", ".markdown") else reflow(text)
    if not text:
        raise ValueError(f"{name} is empty: there is nothing to summarize.")
    return Document(name, text)


def plain_text(markdown: str) -> str:
    """What Markdown says without code, tables, images, HTML and marks; headings stay, as lines of their own."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[/a-zA-Z][^<>]*>", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\](\([^)]*\)|\[[^\]]*\])", "", text)
    text = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"^\s*(\||\[[^\]]+\]:|[-=*_]{3,}\s*$|:?-+:?\s*\|).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^#+\s*(.*?)\s*#*$", r"\n\1\n", text, flags=re.MULTILINE)
    text = re.sub(r"(\*\*|__|`)(.+?)\1", r"\2", text, flags=re.DOTALL)
    return reflow(text)


def reflow(text: str) -> str:
    """Paragraphs on one line each, apart by an empty line, as in the text that the model has read."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)
