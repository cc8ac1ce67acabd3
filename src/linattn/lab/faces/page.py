"""The report as one HTML file: tables, plots, and the pairs that the network gets most wrong."""

import base64
import html
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .._commandline import write_file
from .evaluate import Pairs, threshold_at
from .pictures import make_figure
from .report_command import HEADING, KEYS, sections

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "figure{display:inline-block;margin:.4em;text-align:center;font-size:12px}figure img{height:112px;margin:1px}"
)


def write(found: dict[str, Any], curves: dict[str, list[Pairs]], faces: np.ndarray, path: Path) -> None:
    """Everything inside one file; `faces` are the ORL pictures in their order, so that pairs can be shown."""
    parts = ["<h1>Faces of unseen people</h1>", f"<p>{html.escape(SUMMARY.format(**found))}</p>"]
    rows = found["baselines"] | {"network, before whitening": found["without_whitening"], "network": found}
    parts += ["<h2>Beside the baselines</h2>", _table("", rows)]
    figure = make_figure(found, curves)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    parts.append(f'<img alt="ROC and ablations" src="{_inline(buffer.getvalue())}">')
    parts += ["<h2>Most alike of two people</h2>", _worst(curves["network"], faces, same=False)]
    parts += ["<h2>Least alike of one person</h2>", _worst(curves["network"], faces, same=True)]
    for name, settings in sections(found).items():
        parts += [f"<h2>{html.escape(name)}</h2>", _table(name, settings)]
    parts.append("<p>Faces: courtesy of AT&amp;T Laboratories Cambridge.</p>")
    whole = f'<!doctype html><meta charset="utf-8"><title>Faces</title><style>{STYLE}</style>' + "\n".join(parts)
    write_file(path, lambda temporary: temporary.write_text(whole, encoding="utf-8"))


SUMMARY = (
    "ORL: 40 people, 4 folds; each network is trained on 30 and verifies the other 10. VAL@FAR is the share of pairs of one "
    "person that are accepted where at most that share of pairs of two people is; mean over folds and over {seeds} seeds, "
    "and pooled: with one threshold for all folds."
)


def _table(name: str, rows: dict[str, dict[str, float]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in [name, *HEADING])
    lines = []
    for setting, one in rows.items():
        cells = "".join(f"<td>{one[key]:.3f}</td>" for key in KEYS)
        lines.append(f"<tr><td>{html.escape(setting)}</td>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _worst(folds: list[Pairs], faces: np.ndarray, same: bool, count: int = 10) -> str:
    """The pairs most wrong against the threshold of their fold at FAR 1e-3."""
    found = []
    per_fold = len(faces) // len(folds)
    i, j = np.triu_indices(per_fold, 1)
    for fold, pairs in enumerate(folds):
        threshold = threshold_at(pairs, 1e-3)
        excess = pairs.distance / threshold if same else threshold / np.maximum(pairs.distance, 1e-9)
        excess = np.where(pairs.same == same, excess, -np.inf)
        for at in np.argsort(-excess)[:count]:
            shown = (fold * per_fold + i[at], fold * per_fold + j[at])
            found.append((excess[at], f"{pairs.distance[at]:.2f} against {threshold:.2f}", shown))
    found.sort(key=lambda one: -one[0])
    figures = []
    for _, caption, shown in found[:count]:
        images = "".join(f'<img alt="face {at}" src="{_picture(faces[at])}">' for at in shown)
        figures.append(f"<figure>{images}<figcaption>{caption}</figcaption></figure>")
    return "".join(figures)


def _picture(face: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(face).save(buffer, "PNG")
    return _inline(buffer.getvalue())


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
