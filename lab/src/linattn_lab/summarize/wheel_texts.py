"""Python wheels as pairs: docstrings (the rest -> the first line) and metadata (the README -> the Summary).

A wheel is read as the zip file that it is, its code parsed but never run.
"""

import ast
import inspect
import re
import warnings
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser
from pathlib import Path

from .markup import LONGEST, plain_text

FEWEST_WORDS = 12  # of a document
SECTION = re.compile(
    r"^\s*(?:(?:args?|arguments|parameters|params|returns?|yields?|raises?|examples?|notes?|attributes|see also|usage"
    r"|references|keyword arg\w*|warnings?|todo)\s*:*\s*$|:(?:param|type|returns?|rtype|raises?|arg|ivar|keyword)\b|@param"
    r"|\.\. (?:code|versionadded|versionchanged|deprecated)|>>> )",
    re.IGNORECASE | re.MULTILINE,
)
SKIPPED = re.compile(r"(?:^|/)(?:_?vendor|_vendored|vendored|tests?|testing|test_[^/]*|conftest|migrations)(?:/|\.py$)")
OTHER = re.compile(r"^(?:see|copyright|deprecated|todo|test|alias|internal|private|auto-?generated|\W)", re.IGNORECASE)


def docstring_pair(docstring: str) -> tuple[str, str] | None:
    """(document, summary): the text up to its first section of parameters and the like, and the line before it."""
    text = inspect.cleandoc(docstring)
    first, _, rest = text.partition("\n\n")
    if "\n" in first.strip() or not rest:  # the first line must stand alone
        return None
    summary = " ".join(first.split()).rstrip(".")
    cut = SECTION.search(rest)
    document = plain_text(rest[: cut.start()] if cut else rest)[:LONGEST]
    words = summary.split()
    if len(document.split()) < FEWEST_WORDS or not 3 <= len(words) <= 20 or OTHER.match(summary):
        return None
    if sum(c.isalpha() or c == " " for c in summary) < 0.85 * len(summary):  # code, not words
        return None
    return document, summary


def docstrings(code: str) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return  # a template, or of another Python
    nodes: list[ast.AST] = [tree]
    while nodes:  # definitions alone: expressions are most of a tree
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node, clean=False)
            if found:
                yield found
        nodes += reversed(getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else [])


def wheel_docstrings(path: Path, most: int = 60) -> list[tuple[str, str]]:
    """The first `most` pairs of a wheel's docstrings, each summary once: methods that do the same are told the same."""
    found: dict[str, tuple[str, str]] = {}
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if len(found) >= most:
                break
            if name.endswith(".py") and not SKIPPED.search(name):
                for docstring in docstrings(wheel.read(name).decode("utf-8", errors="replace")):
                    pair = docstring_pair(docstring)
                    if pair is not None:
                        found.setdefault(pair[1].lower(), pair)
    return list(found.values())[:most]


def wheel_readme(path: Path) -> tuple[str, str] | None:
    """(README, Summary) of a wheel's metadata."""
    with zipfile.ZipFile(path) as wheel:
        return metadata_pair(wheel_metadata(wheel))


def wheel_metadata(wheel: zipfile.ZipFile) -> bytes:
    """The METADATA file; empty where there is none."""
    name = next((name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
    return b"" if name is None else wheel.read(name)


def metadata_readme(data: bytes) -> str:
    """The README out of a METADATA file, as plain text; empty where there is none."""
    fields = BytesParser().parsebytes(data)
    body = fields.get_payload(decode=True)
    text = body.decode("utf-8", errors="replace") if isinstance(body, bytes) else ""
    if not text.strip() and fields["Description"]:  # as older tools write it, every line after the first indented
        text = re.sub(r"\n {7}[ |]", "\n", str(fields["Description"]))
    return plain_text(text)


def metadata_pair(data: bytes) -> tuple[str, str] | None:
    """(README as plain text, Summary) out of a METADATA file."""
    summary = " ".join(str(BytesParser().parsebytes(data, headersonly=True)["Summary"] or "").split()).rstrip(".")
    document = metadata_readme(data)[:LONGEST]
    words = summary.split()
    if len(document.split()) < FEWEST_WORDS or not 3 <= len(words) <= 25:
        return None
    return document, summary
