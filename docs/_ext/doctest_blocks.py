"""Griffe extension: doctest examples in docstrings become fenced code blocks, which Markdown would read as quotations."""

from typing import Any

import griffe


def fence(text: str) -> str:
    """Puts ```pycon fences around each run of lines that starts with >>> and ends at an empty line."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        indent = line[: len(line) - len(line.lstrip())]
        if not inside and line.lstrip().startswith(">>>"):
            lines.append(f"{indent}```pycon")
            inside, margin = True, indent
        elif inside and not line.strip():
            lines.append(f"{margin}```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1])


class DoctestBlocks(griffe.Extension):
    """Rewrites the docstring of every object that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)
