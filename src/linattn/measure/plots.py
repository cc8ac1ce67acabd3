"""Pictures of measurements. Needs matplotlib, which comes with the extra `pages`."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from torch import Tensor

from ..pages.charts import COLOURS
from .compare import Comparison, Row


@dataclass(frozen=True)
class Series:
    """One line of a plot. colour: None is the colour of text."""

    label: str
    rows: list[Row]
    colour: str | None
    dashed: bool


def series(result: Comparison) -> list[Series]:
    """Softmax, then each kernel in each engine; a kernel keeps its colour, and all engines but the last are dashed."""
    engines = list(dict.fromkeys(row.engine for row in result.rows))
    found = [Series("softmax (torch SDPA)", result.softmax, None, False)]
    for kernel, engine in result.kinds():
        label = kernel if len(engines) == 1 else f"{kernel}, {engine}"
        found.append(Series(label, result.of(kernel, engine), colour_of(result, kernel), engine != engines[-1]))
    return found


def colour_of(result: Comparison, kernel: str) -> str:
    kernels = list(dict.fromkeys(row.kernel for row in result.rows))
    return COLOURS[kernels.index(kernel) % len(COLOURS)]


def measures(result: Comparison) -> dict[str, str]:
    """Measure -> title, of those that were measured: memory is not on every system."""
    known = any(row.peak_bytes for row in [*result.softmax, *result.rows])
    memory = {"memory": "peak extra memory, MiB"} if known else {}
    return {"time": "time, ms"} | memory | {"speedup": "times faster than softmax"}


def growth(result: Comparison) -> Figure:
    """Time, peak memory and speed-up against the number of tokens, on logarithmic axes."""
    chosen = measures(result)
    figure = Figure(figsize=(11 * len(chosen) / 3, 3.6), layout="constrained")
    axes = figure.subplots(1, len(chosen))
    for axis, measure in zip(axes, chosen, strict=True):
        _draw_measure(axis, result, measure)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=min(4, len(handles[0])), frameon=False)
    return figure


def panel(result: Comparison, measure: str) -> Figure:
    """One measure against the number of tokens, without a legend."""
    figure = Figure(figsize=(3.6, 3.0), layout="constrained")
    _draw_measure(figure.subplots(), result, measure)
    return figure


def _draw_measure(axis: Any, result: Comparison, measure: str) -> None:
    ink = matplotlib.rcParams["text.color"]
    values = []
    for one in series(result):
        if measure == "speedup" and one.rows is result.softmax:
            continue
        points = [(row.tokens, y) for row in one.rows if (y := _value(row, measure))]
        values += [y for _, y in points]
        axis.plot(
            [n for n, _ in points],
            [y for _, y in points],
            color=one.colour or ink,
            linestyle="--" if one.dashed else "-",
            marker="o",
            markersize=3,
            label=one.label,
        )
    if measure == "speedup":
        axis.axhline(1, color=ink, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="tokens", title=measures(result)[measure])
    axis.xaxis.set_major_locator(FixedLocator(tick_places([row.tokens for row in result.softmax])))
    wide = bool(values) and max(values) > 30 * min(values)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=6))
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.7g}"))
        ticks.set_minor_formatter(NullFormatter())
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(True, which="major", alpha=0.3)


def _value(row: Row, measure: str) -> float:
    if measure == "time":
        return row.seconds * 1e3
    return row.speedup if measure == "speedup" else (row.peak_bytes or 0) / 2**20


def tick_places(lengths: Sequence[int]) -> list[int]:
    """Every length, or every second, third, .. from the longest on: labels of a logarithmic axis must not touch."""
    ordered = sorted(set(lengths))
    for step in range(1, len(ordered) + 1):
        kept = ordered[::-1][::step][::-1]
        gaps = [math.log(after / before) for before, after in pairwise(kept)]
        if not gaps or min(gaps) >= 0.19 * math.log(ordered[-1] / ordered[0]):
            return kept
    return ordered


def map_png(matrix: Tensor) -> bytes:
    """An attention matrix as a PNG of one pixel for each weight, the root of it from dark (0) to light (its largest)."""
    roots = matrix.detach().float().clamp_min(0).sqrt()
    buffer = io.BytesIO()
    imsave(buffer, roots.numpy(), cmap="magma", vmin=0, vmax=max(float(roots.max()), 1e-12), format="png")
    return buffer.getvalue()
