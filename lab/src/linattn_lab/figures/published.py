"""The files docs/lab/figures/<name>.json: a command, what it costs, and the figures that it printed."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn._files import parsing, write_json

from .figure import Figure


@dataclass
class Published:
    """One file.

    Attributes:
        name: of the file, without its suffix.
        command: what prints the figures; several are joined by `&&`, and the last one takes --figures.
        minutes: of one core.
        figures: by key. A key `table|row|column` has its place in a table of the docs.
        quick: a reduced form of the same kind that takes seconds, or None.
    """

    name: str
    command: str
    minutes: float
    figures: dict[str, Figure] = field(default_factory=dict)
    quick: "Published | None" = None

    def facts(self) -> dict[str, Any]:
        figures = {key: figure.facts() for key, figure in self.figures.items()}
        found: dict[str, Any] = {"command": self.command, "minutes": self.minutes, "figures": figures}
        return found if self.quick is None else found | {"quick": self.quick.facts()}


def read_figures(path: Path) -> dict[str, Figure]:
    """What --figures wrote."""
    with parsing(path):
        return {key: Figure(**facts) for key, facts in json.loads(path.read_text(encoding="utf-8")).items()}


def read_published(path: Path) -> Published:
    with parsing(path):
        return _published(path.stem, json.loads(path.read_text(encoding="utf-8")))


def _published(name: str, facts: dict[str, Any]) -> Published:
    figures = {key: Figure(**one) for key, one in facts["figures"].items()}
    quick = _published(name, facts["quick"]) if "quick" in facts else None
    return Published(name, facts["command"], float(facts["minutes"]), figures, quick)


def read_all(docs: Path) -> dict[str, Published]:
    """All files of a folder of docs, by name."""
    folder = docs / "figures"
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: run this in the repository, or name the folder by --docs.")
    return {path.stem: read_published(path) for path in sorted(folder.glob("*.json"))}


def write_published(published: Published, docs: Path) -> Path:
    path = docs / "figures" / f"{published.name}.json"
    write_json(path, published.facts())
    return path
