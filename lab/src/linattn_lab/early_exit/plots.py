"""The report's plots."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..plotting import new_figure
from .rules import RULES, entropy, name_of
from .study import Curve, Study, point_name, spearman, static_name

COLOURS = {"entropy": "tab:blue", "confidence": "tab:orange", "patience": "tab:green"}
SHOWN = 12  # images in a row of the gallery


def _figure(width: float, height: float, columns: int) -> tuple[Figure, list[Any]]:
    figure = new_figure(width, height)
    return figure, list(np.atleast_1d(figure.subplots(1, columns)))


def curves(study: Study) -> Figure:
    """Accuracy against MACs and against measured time, three rules and the networks without exits."""
    figure, (cost, one, many) = _figure(13, 4.2, 3)
    _accuracy_and_macs(cost, study.curve)
    cost.plot([s.macs / 1e6 for s in study.statics], [s.accuracy for s in study.statics], "ks--", label="without exits")
    for s in study.statics:
        cost.annotate(f"width {s.width}", (s.macs / 1e6, s.accuracy), (4, -11), textcoords="offset points", fontsize=8)
    cost.legend(fontsize=8)
    points = {point_name(p): p for p in [study.curve.chosen, *study.curve.points]}
    for axes, batch in ((one, 1), (many, 128)):
        taken = {name: own.processor for name, own in study.times[batch].items()}
        for name in RULES:
            own = sorted(
                (taken[key], p.accuracy) for key, p in points.items() if key in taken and name_of(p.rule) == name
            )
            axes.plot([1e3 * t for t, _ in own], [a for _, a in own], "o-", color=COLOURS[name], label=name, ms=4)
        still = sorted((taken[static_name(s.width)], s.accuracy) for s in study.statics)
        axes.plot([1e3 * t for t, _ in still], [a for _, a in still], "ks--", label="without exits")
        axes.plot(1e3 * taken[point_name(study.curve.chosen)], study.curve.chosen.accuracy, "r*", ms=14, label="chosen")
        axes.set(xlabel=f"ms per picture, batches of {min(batch, len(study.test))}", ylabel="accuracy")
        axes.grid(alpha=0.3)
    return figure


def _accuracy_and_macs(axes: Axes, curve: Curve) -> None:
    for name in RULES:
        own = sorted((p.macs / 1e6, p.accuracy) for p in curve.points if name_of(p.rule) == name)
        axes.plot([m for m, _ in own], [a for _, a in own], ".-", color=COLOURS[name], label=name)
    axes.axhline(curve.full_accuracy, color="grey", lw=0.8, ls=":", label="last exit, no early exits")
    axes.plot(curve.chosen.macs / 1e6, curve.chosen.accuracy, "r*", ms=14, label="chosen on validation")
    axes.set(xlabel="million MACs per picture", ylabel="accuracy")
    axes.grid(alpha=0.3)


def exits(study: Study) -> Figure:
    """Each exit: who takes it, how right it is, and what images they are."""
    truth = [name for name in ("noise", "size") if name in study.test.truth]
    figure, axes = _figure(13, 3.6, 2 + len(truth))
    curve, labels = study.curve, [str(number + 1) for number in range(len(study.curve.logits))]
    places = np.arange(len(labels))
    axes[0].bar(places, curve.chosen.shares, color="tab:blue")
    axes[0].set(xlabel="exit", ylabel="share of pictures that leave there", xticks=places, xticklabels=labels)
    found = curve.exit_accuracies(study.test.labels)
    axes[1].bar(places - 0.2, [whole for whole, _ in found], 0.4, label="of all pictures")
    axes[1].bar(places + 0.2, [own or 0.0 for _, own in found], 0.4, label="of those that leave there")
    axes[1].set(xlabel="exit", ylabel="accuracy", xticks=places, xticklabels=labels, ylim=(0, 1.25))
    axes[1].legend(fontsize=8, loc="upper right")
    for name, own in zip(truth, axes[2:], strict=True):
        values = [study.test.truth[name][curve.exits.numpy() == number] for number in places]
        taken = [(label, value) for label, value in zip(labels, values, strict=True) if len(value)]
        own.boxplot([value for _, value in taken], showfliers=False)
        own.set(xlabel="exit", ylabel=name, xticks=range(1, len(taken) + 1), xticklabels=[label for label, _ in taken])
    return figure


def galleries(study: Study) -> Figure:
    """What leaves first (surest at the first exit), what goes to the end (least sure at the first), and what is got wrong."""
    curve, test = study.curve, study.test
    doubt = entropy(curve.logits[0])
    last = len(curve.logits) - 1
    named = curve.logits.argmax(-1).gather(0, curve.exits[None])[0]
    rows = [
        ("leave first", _first(doubt, curve.exits == 0, descending=False)),
        ("go to the end", _first(doubt, curve.exits == last, descending=True)),
        ("left first, wrong", _first(doubt, (curve.exits == 0) & (named != test.labels), descending=False)),
    ]
    figure = new_figure(13, 4.2)
    grid = figure.subplots(len(rows), SHOWN)
    for (title, places), line in zip(rows, grid, strict=True):
        line[0].set_ylabel(title)
        for axes, place in zip(line, places, strict=False):
            axes.imshow(test.images[place].permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            right = bool(named[place] == test.labels[place])
            axes.set_title(study.classes[named[place]].replace("_", " "), fontsize=8, color="black" if right else "red")
        for axes in line:
            axes.set(xticks=[], yticks=[])
        for axes in line[len(places) :]:
            axes.set_frame_on(False)
    return figure


def _first(doubt: Tensor, among: Tensor, *, descending: bool) -> list[int]:
    places = among.nonzero()[:, 0]
    return places[doubt[places].argsort(descending=descending)][:SHOWN].tolist()


def depth(found: Tensor, taken: Tensor) -> Figure:
    """Images by prediction depth and exit taken."""
    figure, (counts, means) = _figure(11, 3.8, 2)
    table = torch.zeros(int(taken.max()) + 1, int(found.max()) + 1)
    table.index_put_((taken, found), torch.ones(len(found)), accumulate=True)
    share = table / table.sum(0, keepdim=True).clamp_min(1)
    image = counts.imshow(share.numpy(), origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
    figure.colorbar(image, ax=counts, label="share of the pictures of a depth")
    counts.set(xlabel="prediction depth", ylabel="exit taken", yticks=range(len(table)))
    counts.set_yticklabels([str(number + 1) for number in range(len(table))])
    there = sorted(set(found.tolist()))
    mean = [float(taken[found == level].double().mean()) + 1 for level in there]
    means.plot(there, mean, "o-")
    for level, height in zip(there, mean, strict=False):
        means.annotate(
            str(int((found == level).sum())), (level, height), (0, 6), textcoords="offset points", fontsize=7
        )
    known = spearman(found, taken)
    means.set(xlabel="prediction depth", ylabel="mean exit taken")
    if known is not None:
        means.set_title(f"Spearman {known['spearman']:.3f}, p = {known['p']:.1g}", fontsize=10)
    means.grid(alpha=0.3)
    return figure


def transformer(curve: Curve) -> Figure:
    figure, (left, right) = _figure(11, 3.8, 2)
    _accuracy_and_macs(left, curve)
    left.legend(fontsize=8)
    places: Sequence[int] = range(1, len(curve.logits) + 1)
    right.bar(places, curve.chosen.shares)
    right.set(xlabel="exit (after layer)", ylabel="share of sequences that leave there", xticks=places)
    return figure
