"""Debian's package descriptions: a long text and a one-line synopsis for every package, from apt's index files."""

import gzip
import lzma
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .apt import fetch_apt_lists
from .cache import DataMissing

# A release itself, not its updates, security and backports, which repeat it. Names as apt writes them.
RELEASE = re.compile(r"_dists_[^_-]+_(?:.+_)?(?:i18n_Translation-en|binary-[^_]+_Packages)(?:\.gz|\.xz)?")
BULLET = re.compile(r"[*+\u2022\u00b7-]\s|o\s\s|\d+[.)]\s")


@dataclass(frozen=True)
class Description:
    """What a package is; `text` has its paragraphs apart by an empty line, list items on lines of their own."""

    package: str
    source: str
    synopsis: str
    text: str


def debian_descriptions(lists: Path | None = None) -> list[Description]:
    """All English descriptions in apt's index, in the order of package names.

    Args:
        lists: a folder of apt lists (files that end in `_Packages` and `_Translation-en`, plain, .gz or .xz); by default
            they are downloaded by apt-get into a temporary folder.
    """
    if lists is None:
        with tempfile.TemporaryDirectory(prefix="linattn-apt-") as folder:
            fetch_apt_lists(Path(folder), languages="en")
            return debian_descriptions(Path(folder))
    files = [path for path in sorted(lists.glob("*")) if RELEASE.search(path.name)]
    translations = [path for path in files if "_Translation-en" in path.name]
    packages = [path for path in files if "_Packages" in path.name]
    if not translations or not packages:
        raise DataMissing(
            f"{lists} holds no {'Translation-en' if packages else 'Packages'} file of a Debian release: fill it with "
            "`apt-get update -o Acquire::Languages=en -o Acquire::GzipIndexes=false -o Dir::State::Lists=FOLDER`."
        )
    sources: dict[str, str] = {}
    for path in packages:
        for fields in read_stanzas(path):
            name = fields["Package"][0]
            sources.setdefault(name, fields.get("Source", [name])[0].split()[0])  # `Source: name (version)`
    found: dict[str, Description] = {}
    for path in translations:
        for fields in read_stanzas(path):
            name, lines = fields["Package"][0], fields["Description-en"]
            # A package of other architectures alone is in no Packages file here, and counts as its own source.
            found.setdefault(
                name, Description(name, sources.get(name, name), clean(lines[0]), join_paragraphs(lines[1:]))
            )
    return [found[name] for name in sorted(found)]


@dataclass(frozen=True)
class Package:
    """What apt's index says of a package besides its description; size: bytes of its file."""

    name: str
    source: str
    section: str
    size: int


def debian_packages(lists: Path) -> dict[str, Package]:
    """Every package in a folder of apt lists, by name."""
    found: dict[str, Package] = {}
    for path in sorted(lists.glob("*")):
        if RELEASE.search(path.name) and "_Packages" in path.name:
            for fields in read_stanzas(path):
                name = fields["Package"][0]
                source = fields.get("Source", [name])[0].split()[0]
                section, size = fields.get("Section", [""])[0], int(fields.get("Size", ["0"])[0])
                found.setdefault(name, Package(name, source, section, size))
    return found


def read_stanzas(path: Path) -> Iterator[dict[str, list[str]]]:
    """The stanzas of a control file: every field with its lines, those that go on still with their blanks in front."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    fields: dict[str, list[str]] = {}
    lines: list[str] = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:  # type: ignore[operator]
            for number, line in enumerate(file, 1):
                line = line.rstrip("\n")
                if not line:
                    if fields:
                        yield fields
                    fields = {}
                elif line[0] in " \t":
                    if not fields:
                        raise ValueError(f"{path}, line {number}: a line goes on where no field began: {line!r}.")
                    lines.append(line)
                else:
                    name, colon, value = line.partition(":")
                    if not colon:
                        raise ValueError(f"{path}, line {number}: expected `Field: value`, got {line!r}.")
                    lines = fields[name] = [value.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason}): it is no index file of apt's.") from error
    if fields:
        yield fields


def join_paragraphs(lines: list[str]) -> str:
    """The lines of a long description as text: ` .` parts paragraphs, two blanks or a bullet begin a line of a list."""
    paragraphs: list[list[str]] = [[]]
    listed = False
    for line in lines:
        words = clean(line)
        if words in ("", "."):
            paragraphs.append([])
            continue
        item = bool(BULLET.match(line.strip()))
        indented = line.startswith("  ")
        if paragraphs[-1] and not item and indented == listed:
            paragraphs[-1][-1] += " " + words
        else:
            paragraphs[-1].append(words)
        listed = indented
    return "\n\n".join("\n".join(paragraph) for paragraph in paragraphs if paragraph)


def clean(text: str) -> str:
    """One blank between words, none around them."""
    return " ".join(text.split())
