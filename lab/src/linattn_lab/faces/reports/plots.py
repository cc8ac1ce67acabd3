"""Plots of the report."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...plotting import new_figure, save_figure
from ..verification.metrics import FARS, Pairs, join, roc

STYLE = {"1e-2": ("C0", "FAR 1e-2"), "1e-3": ("C1", "FAR 1e-3")}


def draw(found: dict[str, Any], curves: dict[str, list[Pairs]], path: Path) -> None:
    save_figure(make_figure(found, curves), path, dpi=90)


def make_figure(found: dict[str, Any], curves: dict[str, list[Pairs]]) -> Figure:
    """ROC of the default beside the baselines, and VAL@FAR over everything that was changed."""
    panels = {f"mining, {found[name]['semihard']['steps']} steps": found[name] for name in ("mining", "mining_slow")}
    panels |= {"bytes per embedding": found["bytes"], "JPEG quality": found["jpeg"]} | found["ablations"]
    figure = new_figure(15, 4 + 3.2 * int(np.ceil(len(panels) / 4)))
    rows = int(np.ceil(len(panels) / 4))
    grid = figure.add_gridspec(rows + 1, 4, height_ratios=[1.4] + [1] * rows)
    _curves(figure.add_subplot(grid[0, :2]), curves)
    _bars(figure.add_subplot(grid[0, 2:]), found)
    for at, (name, settings) in enumerate(panels.items()):
        _panel(figure.add_subplot(grid[1 + at // 4, at % 4]), name, settings, legend=at == 0)
    return figure


def _curves(axis: Axes, curves: dict[str, list[Pairs]]) -> None:
    for name, folds in curves.items():
        far, val = roc(join(folds))
        axis.semilogx(np.maximum(far, 1e-5), val, label=name, drawstyle="steps-post")
    for rate in FARS:
        axis.axvline(rate, color="0.7", lw=0.8)
    axis.set(xlim=(1e-4, 1), ylim=(0, 1.01), xlabel="FAR: pairs of two people accepted")
    axis.set(ylabel="VAL: pairs of one person accepted", title="ORL, unseen people: ROC, four folds pooled")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")


def _bars(axis: Axes, found: dict[str, Any]) -> None:
    names = {"pixels": "pixels", "pca": "PCA", "fisherfaces": "Fisherfaces"}
    rows = {label: found["baselines"][name] for name, label in names.items()}
    rows |= {"network": found["without_whitening"], "network,\nwhitened": found}
    rows |= {kind.replace("_", "-"): None for kind in found["harmonic"]}
    for offset, (far, (colour, label)) in zip((-0.2, 0.2), STYLE.items(), strict=True):
        harmonic = found["harmonic" if far == "1e-2" else "harmonic_1e-3"]
        values = [harmonic[n.replace("-", "_")] if one is None else one[f"val_at_far_{far}"] for n, one in rows.items()]
        bars = axis.bar(np.arange(len(rows)) + offset, values, 0.4, color=colour, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
        at = list(rows).index("network,\nwhitened")
        low, high = found["interval_95"][f"val_at_far_{far}"]
        axis.plot([at + offset] * 2, [low, high], color="k", lw=1.5)
    axis.set_xticks(range(len(rows)), list(rows), fontsize=9)
    axis.set(ylim=(0, 1.05), title="VAL@FAR, mean over folds; bar: 95 % interval over people; right: harmonic")
    axis.legend(loc="upper left")


def _panel(axis: Axes, name: str, settings: dict[str, dict[str, float]], legend: bool) -> None:
    for far, (colour, label) in STYLE.items():
        values = [one[f"val_at_far_{far}"] for one in settings.values()]
        kinds = name.startswith(("mining", "network"))  # no order among them, so no line
        axis.plot(range(len(values)), values, "o" if kinds else "o-", color=colour, label=label)
    axis.set_xticks(range(len(settings)), list(settings))
    if sum(map(len, settings)) > 40:  # names that would run into each other
        axis.set_xticks(range(len(settings)), list(settings), rotation=20, ha="right", fontsize=9)
    axis.set(title=name, ylim=(0, 1))
    axis.set_xlim(-0.4, len(settings) - 0.6)
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(loc="lower left")
