"""What the decoder looked at: the document's words coloured for each word of the summary, as a page or a picture."""

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._commandline import write_file
from .documents import Document

LEAST = 0.005  # shares of the attention below this are not shown
COLUMNS = 36  # words of the document in a picture
STYLE = """
body { font: 17px/1.7 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
.summary { font-size: 1.4rem; margin: 1rem 0; }
.summary button { font: inherit; border: 0; border-bottom: 4px solid; border-radius: 4px 4px 0 0; padding: 0 0.25rem;
  margin: 0 0.1rem; background: none; cursor: pointer; }
.summary button[aria-pressed=true] { background: #eee; }
.note { color: #666; font-size: 0.9rem; }
.document { white-space: pre-wrap; border-top: 1px solid #ddd; padding-top: 1rem; }
.document span { border-radius: 3px; }
"""
SCRIPT = """
const spans = document.querySelectorAll('.document span'), buttons = document.querySelectorAll('.summary button');
const note = document.querySelector('.note'), hint = note.textContent;
function paint(chosen) {
  spans.forEach(s => s.style.background = s.title = '');
  const share = {};
  looks.forEach((look, i) => { if (chosen === null || chosen === i) for (const [word, weight] of look.words)
    if (!share[word] || share[word][0] < weight) share[word] = [weight, i]; });
  for (const [word, [weight, i]] of Object.entries(share)) {
    spans[word].style.background = `hsl(${looks[i].hue} 85% 55% / ${0.12 + 0.88 * weight})`;
    spans[word].title = `${looks[i].text}: ${Math.round(100 * weight)} %`;
  }
  buttons.forEach((b, i) => b.setAttribute('aria-pressed', chosen === i));
  note.textContent = chosen === null ? hint : `${looks[chosen].text}: ${Math.round(100 * looks[chosen].copy)} % copied`;
}
let held = null;
buttons.forEach((b, i) => {
  b.onmouseenter = () => paint(i);
  b.onmouseleave = () => paint(held);
  b.onclick = () => { held = held === i ? null : i; paint(held); };
});
paint(null);
"""


@dataclass
class Look:
    """One word of a summary: the share that was copied, and the document's words it looked at, with their shares."""

    text: str
    copy: float
    words: dict[int, float]


def words_of(text: str) -> list[tuple[int, int]]:
    """Where each word of a text stands: (first character, last + 1)."""
    return [found.span() for found in re.finditer(r"\S+", text)]


def looks(explanation: Any, document: str) -> list[Look]:
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
    return [(summary[start:end], own) for (start, end), own in zip(spans, tokens) if own]


def draw(explanation: Any, document: Document, path: Path) -> None:
    """Writes a page (.html) or a picture (.png)."""
    found = looks(explanation, document.text)
    if path.suffix.lower() == ".html":
        text = make_page(found, document)
        write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    else:
        figure = make_picture(found, document)
        write_file(path, lambda temporary: figure.savefig(temporary, dpi=130))


def make_page(found: list[Look], document: Document) -> str:
    """A page that needs no other file: point at a word of the summary to see where it comes from."""
    hues = [round(360 * i / max(1, len(found))) for i in range(len(found))]
    buttons = "".join(
        f'<button style="border-color: hsl({hue} 85% 55%)">{html.escape(look.text)}</button>'
        for hue, look in zip(hues, found)
    )
    body, place = [], 0
    for start, end in words_of(document.text):
        body.append(f"{html.escape(document.text[place:start])}<span>{html.escape(document.text[start:end])}</span>")
        place = end
    data = [
        {
            "text": look.text,
            "copy": round(look.copy, 4),
            "hue": hue,
            "words": [[i, round(w, 4)] for i, w in look.words.items()],
        }
        for hue, look in zip(hues, found)
    ]
    # "</" would end the script inside of a text.
    script = f"const looks = {json.dumps(data)};".replace("</", "<\\/") + SCRIPT
    title = html.escape(document.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n<div class=summary>{buttons}</div>\n"
        "<p class=note>Point at a word of the summary to see what the decoder looked at; click to hold it.</p>\n"
        f'<div class="document">{"".join(body)}</div>\n<script>{script}</script>\n</body></html>\n'
    )


def make_picture(found: list[Look], document: Document) -> Any:
    """The summary's words in rows, the document's words they looked at most in columns, in the document's order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spans = words_of(document.text)
    total: dict[int, float] = {}
    for look in found:
        for word, share in look.words.items():
            total[word] = max(total.get(word, 0.0), share)
    columns = sorted(sorted(total, key=lambda word: -total[word])[:COLUMNS])
    shares = np.array([[look.words.get(word, 0.0) for word in columns] for look in found]).reshape(len(found), -1)
    figure = Figure(figsize=(3 + 0.28 * len(columns), 2.2 + 0.3 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
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
