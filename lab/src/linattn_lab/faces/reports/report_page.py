"""The report as one page: tables, plots, and the pairs that the network gets most wrong."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from linattn import pages

from ..verification.metrics import Pairs, threshold_at
from .plots import make_figure
from .report_text import HEADING, KEYS, sections

TEMPLATE = Path(__file__).with_name("report_page.html.j2")
SUMMARY = (
    "ORL: 40 people, 4 folds; each network is trained on 30 and verifies the other 10. VAL@FAR is the share of pairs of one "
    "person that are accepted where at most that share of pairs of two people is; mean over folds and over {seeds} seeds, "
    "and pooled: with one threshold for all folds."
)


def write(found: dict[str, Any], curves: dict[str, list[Pairs]], faces: np.ndarray, path: Path) -> None:
    """Everything inside one file; `faces` are the ORL images in their order, so that pairs can be shown."""
    rows = found["baselines"] | {"network, before whitening": found["without_whitening"], "network": found}
    worst = {
        "Most similar pairs of different people": _worst(curves["network"], faces, same=False),
        "Least similar pairs of one person": _worst(curves["network"], faces, same=True),
    }
    pages.write_page(
        path,
        TEMPLATE,
        title="Faces of unseen people",
        summary=SUMMARY.format(**found),
        baselines=_rows("", rows),
        plot=pages.plot_address(make_figure(found, curves), dpi=80),
        worst=worst,
        ablations={name: _rows(name, settings) for name, settings in sections(found).items()},
    )


def _rows(name: str, settings: dict[str, dict[str, float]]) -> list[list[str]]:
    return [[name, *HEADING], *([setting, *(f"{one[key]:.3f}" for key in KEYS)] for setting, one in settings.items())]


def _worst(folds: list[Pairs], faces: np.ndarray, same: bool, count: int = 10) -> list[dict[str, Any]]:
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
    return [
        {"caption": caption, "images": [_address(faces[at]) for at in shown]} for _, caption, shown in found[:count]
    ]


def _address(face: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(face).save(buffer, "PNG")
    return pages.data_address(buffer.getvalue())
