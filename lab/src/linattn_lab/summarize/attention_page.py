"""The decoder's attention: the words of the document, coloured for each word of the summary, as a page or a plot."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linattn import pages

from ..plotting import new_figure, save_figure
from .documents import Document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .summarizer import Explanation

LEAST = 0.005  # shares of the attention below this are not shown
COLUMNS = 36  # words of the document in an image
TEMPLATE = Path(__file__).with_name("attention_page.html.j2")


@dataclass
class Look:
    """One word of a summary: the share that was copied, and the document's words it looked at, with their shares."""

    text: str
    copy: float
    words: dict[int, float]


def words_of(text: str) -> list[tuple[int, int]]:
    """Where each word of a text stands: (first character, last + 1)."""
    return [found.span() for found in re.finditer(r"\S+", text)]


def looks(explanation: "Explanation", document: str) -> list[Look]:
    """From tokens to words: a word looks where its tokens look, on average, and at whole words of the document."""
    spans = words_of(document)
    owner = np.full(len(document) + 1, -1)
    for number, (start, end) in enumerate(spans):
        owner[start:end] = number
    # A token may begin with the blank before its word, so its last character says which word it is part of.
    columns = np.array([owner[max(start, end - 1)] for start, end in explanation.source])
    weights = np.asarray(explanation.attention, dtype=float)  # (outputs, source tokens)
    copies = np.asarray(explanation.copy, dtype=float)  # (outputs,)
    found = []
    for text, tokens in output_words(explanation.summary, explanation.output):
        shares = np.bincount(columns[columns >= 0], weights[tokens].mean(0)[columns >= 0], minlength=len(spans))
        seen = {int(i): float(shares[i]) for i in np.flatnonzero(shares >= min(LEAST, shares.max()))}
        found.append(Look(text, float(copies[tokens].mean()), seen))
    return found


def output_words(summary: str, pieces: list[str]) -> list[tuple[str, list[int]]]:
    """The words of a summary, each with the numbers of the tokens it was written with."""
    spans = words_of(summary)
    tokens: list[list[int]] = [[] for _ in spans]
    place = word = 0
    for number, piece in enumerate(pieces):
        at = summary.find(
            piece.strip(), place
        )  # half a character, of several bytes, is not found and stays with its word
        if piece.strip() and at >= 0:
            while word + 1 < len(spans) and at >= spans[word][1]:
                word += 1
            place = at + len(piece.strip())
        if tokens:
            tokens[word].append(number)
    return [(summary[start:end], own) for (start, end), own in zip(spans, tokens, strict=True) if own]


def draw(explanation: "Explanation", document: Document, path: Path) -> None:
    """Writes a page (.html) or a plot (.png)."""
    found = looks(explanation, document.text)
    if path.suffix.lower() == ".html":
        write_page(found, document, path)
    else:
        save_figure(make_picture(found, document), path)


def write_page(found: list[Look], document: Document, path: Path) -> None:
    """A page on which pointing at a word of the summary colours the words of the document that it attended to."""
    hues = [round(360 * i / max(1, len(found))) for i in range(len(found))]
    body, place = [], 0
    for start, end in words_of(document.text):
        body.append((document.text[place:start], document.text[start:end]))
        place = end
    data = [
        {
            "text": look.text,
            "copy": round(look.copy, 4),
            "hue": hue,
            "words": [[i, round(w, 4)] for i, w in look.words.items()],
        }
        for hue, look in zip(hues, found, strict=True)
    ]
    pages.write_page(path, TEMPLATE, title=document.name, looks=data, words=body)


def make_picture(found: list[Look], document: Document) -> "Figure":
    """The summary's words in rows, the document's words they looked at most in columns, in the document's order."""
    spans = words_of(document.text)
    total: dict[int, float] = {}
    for look in found:
        for word, share in look.words.items():
            total[word] = max(total.get(word, 0.0), share)
    columns = sorted(sorted(total, key=lambda word: -total[word])[:COLUMNS])
    shares = np.array([[look.words.get(word, 0.0) for word in columns] for look in found]).reshape(len(found), -1)
    figure = new_figure(3 + 0.28 * len(columns), 2.2 + 0.3 * len(found))
    axes = figure.subplots()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    labels = [document.text[slice(*spans[word])] for word in columns]
    axes.set_xticks(range(len(columns)), [_plain(label) for label in labels], rotation=60, ha="right", fontsize=9)
    axes.set_yticks(range(len(found)), [f"{_plain(look.text)}  ({100 * look.copy:.0f} % copied)" for look in found])
    axes.set_title("what each word of the summary looked at", fontsize=11)
    figure.colorbar(picture, label="share of attention", fraction=0.03)
    return figure


def _plain(text: str) -> str:
    """Dollar signs would begin mathematics in a picture."""
    return text.replace("$", r"\$")[:30]
