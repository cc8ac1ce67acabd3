"""Plots of the report."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from ..images import ImageSet
from ..images.figures import draw_tiles
from ..plotting import new_figure
from .runs import Outcome
from .statistics import ByDepth, Findings, pooled, say_p

COLOUR, SECOND = "#3b6ea5", "#d1793a"


def depth_names(outcome: Outcome) -> list[str]:
    """What each depth means: the point from which all probes agree with the network."""
    return [*outcome.points, "never"]


def draw_histogram(axis: Axes, outcome: Outcome) -> None:
    names = depth_names(outcome)
    for measured, colour, label in ((outcome.test, COLOUR, "test"), (outcome.held_out, SECOND, "training, held out")):
        depth = pooled(measured)[0]
        if not len(depth):
            continue
        share = np.bincount(depth, minlength=len(names)) / len(depth)
        if colour == COLOUR:
            axis.bar(range(len(names)), share, color=colour, label=label)
        else:
            axis.plot(range(len(names)), share, "o", color=colour, label=label, ms=5)
    axis.set(title="How deep are the pictures?", ylabel="share of the pictures", xlabel="prediction depth")
    _depth_ticks(axis, names)
    axis.margins(y=0.2)
    axis.legend(frameon=False)
    _plain(axis)


def draw_accuracy(axis: Axes, found: ByDepth, title: str = "Accuracy by depth", colour: str = COLOUR) -> None:
    """Bars for bands of depth, with how many images they hold, and a dot for every single depth."""
    middles = [(first + last) / 2 for first, last in found.bands]
    widths = [last - first + 0.9 for first, last in found.bands]
    axis.bar(middles, found.accuracy, widths, color=colour, alpha=0.75, label="bands of depth")
    for middle, height, count in zip(middles, found.accuracy, found.counts, strict=True):
        axis.text(middle, 1.03, f"{height:.3f}\n({count})", ha="center", va="bottom", fontsize=8)
    depths, values = [depth for depth, _, _ in found.single], [value for _, _, value in found.single]
    axis.plot(depths, values, "o", color="#222", ms=4, label="single depths")
    axis.set(xticks=range(found.bands[-1][1] + 1), ylim=(0, 1.16), yticks=np.arange(0, 1.01, 0.2))
    axis.set(title=title, ylabel="accuracy of the network", xlabel="prediction depth")
    _plain(axis)


def draw_probes(axis: Axes, findings: Findings, outcome: Outcome) -> None:
    x = range(len(outcome.points))
    for row in findings.probe_accuracy:
        axis.plot(x, row, color=COLOUR, alpha=0.35, lw=1)
    axis.plot(x, findings.probe_accuracy.mean(0), "o-", color=COLOUR, label="probe (nearest neighbours)")
    axis.axhline(float(np.mean(findings.accuracy)), color=SECOND, ls="--", label="network")
    axis.set(title="What can be read at each point", ylabel="accuracy", xticks=x)
    axis.set_xticklabels(outcome.points, rotation=45, ha="right")
    axis.set_ylim(0, 1.03)
    axis.legend(frameon=False, loc="lower right")
    _plain(axis)


def draw_classes(figure: Figure, axis: Axes, findings: Findings, outcome: Outcome, images: ImageSet) -> None:
    """Share of each depth in each class, the classes ordered by their mean depth."""
    names = depth_names(outcome)
    order = np.argsort(findings.class_depth)
    order = order[np.isfinite(np.array(findings.class_depth)[order])]
    depth, _ = pooled(outcome.test)
    labels = np.concatenate([part.labels.numpy() for part in outcome.test])
    rows = np.stack([np.bincount(depth[labels == label], minlength=len(names)) for label in order]).astype(float)
    rows /= rows.sum(1, keepdims=True)
    faint = PowerNorm(0.5, vmin=0)  # most images may have one depth, and the others should still be seen
    drawn = axis.imshow(rows, cmap="Blues", aspect="auto", norm=faint)
    axis.set(title="Class and depth", yticks=range(len(order)), xlabel="prediction depth")
    axis.set_yticklabels(
        [f"{images.classes[label].replace('_', ' ')}  {findings.class_depth[label]:.1f}" for label in order]
    )
    _depth_ticks(axis, names)
    figure.colorbar(drawn, ax=axis, label="share of the class", shrink=0.8)


def draw_truth(axis: Axes, findings: Findings, outcome: Outcome, images: ImageSet, name: str, bins: int = 10) -> None:
    """Mean depth in ten equal parts of the images, by one kind of ground truth, with two standard errors."""
    values = images.test.truth[name][outcome.test[0].places.numpy()]
    parts = np.array_split(np.argsort(values, kind="stable"), min(bins, len(values)))
    x = [values[part].mean() for part in parts]
    mean = [findings.depth[part].mean() for part in parts]
    error = [2 * findings.depth[part].std() / len(part) ** 0.5 for part in parts]
    axis.errorbar(x, mean, error, fmt="o-", color=COLOUR, capsize=3)
    rho, p = findings.truth[name]
    axis.set(title=f"{name}: Spearman {rho:+.3f} ({say_p(p)})", xlabel=f"true {name}", ylabel="mean depth")
    _plain(axis)


def draw_map(figure: Figure, axis: Axes, findings: Findings, outcome: Outcome, images: ImageSet, bins: int = 8) -> None:
    """Mean depth over noise and size."""
    places = outcome.test[0].places.numpy()
    noise, size = images.test.truth["noise"][places], images.test.truth["size"][places]
    weights, x, y = np.histogram2d(size, noise, bins, weights=findings.depth)
    counts, _, _ = np.histogram2d(size, noise, (x, y))
    drawn = axis.pcolormesh(x, y, np.divide(weights, counts, where=counts > 0, out=np.full_like(weights, np.nan)).T)
    axis.set(title="Mean depth by noise and size", xlabel="size (radius in pixels)", ylabel="noise")
    figure.colorbar(drawn, ax=axis, label="mean depth", shrink=0.85)


def draw_consistency(figure: Figure, axis: Axes, findings: Findings, outcome: Outcome) -> None:
    """Depths of the same images in two networks."""
    one, other = outcome.test[0].depth.numpy(), outcome.test[1].depth.numpy()
    size = len(outcome.points) + 1
    counts = np.zeros((size, size))
    np.add.at(counts, (other, one), 1)
    drawn = axis.imshow(np.log10(1 + counts), origin="lower", cmap="Blues")
    axis.set(xlabel="depth, network 1", ylabel="depth, network 2", xticks=range(size), yticks=range(size))
    axis.set_title(f"Two networks: Spearman {findings.consistency[0, 1]:+.3f}")
    figure.colorbar(drawn, ax=axis, label="pictures, log10(1 + n)", shrink=0.85)


def chosen(findings: Findings, outcome: Outcome, count: int, *, hardest: bool) -> np.ndarray:
    """Images of least (or greatest) mean depth; among equals those that the networks are most (least) sure of."""
    sureness = np.mean([part.sureness.numpy() for part in outcome.test], 0)
    order = np.lexsort((-sureness, findings.depth))
    return np.ascontiguousarray(order[::-1][:count] if hardest else order[:count])


def draw_gallery(
    axis: Axes, findings: Findings, outcome: Outcome, images: ImageSet, *, hardest: bool, rows: int, columns: int
) -> None:
    """Images with their depth and true class; where the first network errs, what it says instead, in red."""
    first = outcome.test[0]
    names = [name.replace("_", " ") for name in images.classes]
    places = chosen(findings, outcome, rows * columns, hardest=hardest)
    true, said = first.labels[places].tolist(), first.network[places].tolist()
    draw_tiles(
        axis,
        images.test.images[first.places[places]],
        columns,
        above=[f"{findings.depth[place]:.1f} {names[label]}" for place, label in zip(places, true, strict=True)],
        below=["" if a == b else f"said {names[b]}" for a, b in zip(true, said, strict=True)],
        room=0.32,
    )


def gallery(findings: Findings, outcome: Outcome, images: ImageSet, *, hardest: bool) -> Figure:
    figure = new_figure(11, 4.3)
    draw_gallery(figure.subplots(), findings, outcome, images, hardest=hardest, rows=3, columns=10)
    return figure


def overview(findings: Findings, outcome: Outcome, images: ImageSet) -> Figure:
    """The report in one picture."""
    figure = new_figure(13, 8.4)
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    top, bottom = halves
    left, middle, right = top.subplots(1, 3)
    draw_histogram(left, outcome)
    draw_accuracy(middle, findings.test)
    if {"noise", "size"} <= set(findings.truth):
        draw_map(top, right, findings, outcome, images)
    else:
        draw_classes(top, right, findings, outcome, images)
    for axis, hardest in zip(bottom.subplots(1, 2), (False, True), strict=True):
        axis.set_title("hardest" if hardest else "easiest", fontweight="bold")
        draw_gallery(axis, findings, outcome, images, hardest=hardest, rows=2, columns=6)
    return figure


def _depth_ticks(axis: Axes, names: list[str]) -> None:
    axis.set_xticks(range(len(names)))
    axis.set_xticklabels([f"{place} {name}" for place, name in enumerate(names)], rotation=45, ha="right", fontsize=8)


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, axis="y")
    axis.set_axisbelow(True)
