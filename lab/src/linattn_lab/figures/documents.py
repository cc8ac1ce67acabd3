"""Tables of figures in the docs, between markers, made out of the JSON files alone.

A page has `<!-- figures: NAME -->` or `<!-- figures: NAME TABLE -->`, the table, and `<!-- end of figures -->`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from .figure import Figure
from .published import Published

BLOCK = re.compile(r"^<!-- figures: (?P<what>[^\n]*?) -->\n.*?^<!-- end of figures -->$", re.MULTILINE | re.DOTALL)


def with_tables(text: str, published: Mapping[str, Published], page: str = "page") -> str:
    """The text of a page with the tables between its markers made anew."""

    def block(found: re.Match[str]) -> str:
        name, _, part = found["what"].strip().partition(" ")
        if name not in published:
            raise ValueError(f"{page} has a table of {name!r}, and there is no figures/{name}.json.")
        rows = table_of(published[name].figures, part.strip())
        if not rows:
            raise ValueError(f"{page} has a table {part!r} of {name}, which figures/{name}.json does not have.")
        return f"<!-- figures: {found['what']} -->\n\n{rows}\n\n<!-- end of figures -->"

    return BLOCK.sub(block, text)


def table_of(figures: Mapping[str, Figure], part: str = "") -> str:
    """Figures as a Markdown table: those whose key begins with `part|`, or all without a place in a table of their own.

    Keys `part|row|column` make rows and columns, each cell with its interval; other keys make a row each.
    """
    if not part:
        return _list({key: figure for key, figure in figures.items() if key.count("|") < 2})
    inside = {key.removeprefix(f"{part}|"): one for key, one in figures.items() if key.startswith(f"{part}|")}
    if not inside or not all(key.count("|") == 1 for key in inside):
        return _list(inside)
    return _grid({tuple(key.split("|")): one for key, one in inside.items()})


def _list(figures: Mapping[str, Figure]) -> str:
    if not figures:
        return ""
    rows = [
        f"| {key.replace('|', ', ')} | {one.text()} | {one.interval()} | {_seeds(one)} |"
        for key, one in figures.items()
    ]
    return "\n".join(["| figure | value | 95 % | seeds |", "| --- | --- | --- | --- |", *rows])


def _grid(cells: Mapping[tuple[str, ...], Figure]) -> str:
    names = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = []
    for row in names:
        own = [cells.get((row, column)) for column in columns]
        seeds = {_seeds(one) for one in own if one}
        texts = ["" if one is None else _cell(one) for one in own]
        rows.append(f"| {row} | {' | '.join(texts)} | {'; '.join(sorted(seeds))} |")
    return "\n".join([f"| | {' | '.join(columns)} | seeds |", f"|{' --- |' * (len(columns) + 2)}", *rows])


def _cell(figure: Figure) -> str:
    return figure.text() if figure.low == figure.high else f"{figure.text()} ({figure.interval()})"


def _seeds(figure: Figure) -> str:
    """`0 to 4` for consecutive ones."""
    seeds = sorted(figure.seeds)
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def pages(docs: Path) -> list[Path]:
    return sorted(docs.glob("*.md"))


def outdated(docs: Path, published: Mapping[str, Published]) -> dict[Path, str]:
    """Pages whose tables differ from the files, with the text that they should have."""
    found = {}
    for page in pages(docs):
        text = page.read_text(encoding="utf-8")
        anew = with_tables(text, published, page.name)
        if anew != text:
            found[page] = anew
    return found


def unprinted(docs: Path, published: Mapping[str, Published]) -> list[str]:
    """Figures of the files that no page prints, as NAME: KEY."""
    shown: dict[str, set[str]] = {}
    for page in pages(docs):
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            name, _, part = found["what"].strip().partition(" ")
            keys = published[name].figures if name in published else {}
            inside = {key for key in keys if (key.startswith(f"{part.strip()}|") if part else key.count("|") < 2)}
            shown.setdefault(name, set()).update(inside)
    return [
        f"{name}: {key}" for name, one in published.items() for key in one.figures if key not in shown.get(name, ())
    ]
