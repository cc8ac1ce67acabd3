"""Pictures of measurements. Needs matplotlib, which comes with the extra `lab`."""

from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from .compare import Comparison

COLOURS = [f"C{i}" for i in range(10)]


def growth(result: Comparison) -> Figure:
    """Time, peak memory and speed-up against the number of tokens, on logarithmic axes."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    series: list[tuple[str, Any, str, str]] = [("softmax (torch SDPA)", result.softmax, "#222222", "-")]
    kernels = list(dict.fromkeys(row.kernel for row in result.rows))
    engines = list(dict.fromkeys(row.engine for row in result.rows))
    for kernel, engine in result.kinds():
        label = kernel if len(engines) == 1 else f"{kernel}, {engine}"
        dash = "-" if engine == engines[-1] else "--"
        series.append((label, result.of(kernel, engine), COLOURS[kernels.index(kernel) % len(COLOURS)], dash))
    for label, rows, colour, dash in series:
        tokens = [row.tokens for row in rows]
        style = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 3, "label": label}
        axes[0].plot(tokens, [row.seconds * 1e3 for row in rows], **style)
        known = [(row.tokens, row.peak_bytes / 2**20) for row in rows if row.peak_bytes]
        axes[1].plot([n for n, _ in known], [mib for _, mib in known], **style)
        if rows is not result.softmax:
            axes[2].plot(tokens, [row.speedup for row in rows], **style)
    axes[2].axhline(1, color="#222222", linewidth=1)
    for axis, title in zip(axes, ("time, ms", "peak extra memory, MiB", "times faster than softmax")):
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.grid(True, which="major", alpha=0.3)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(series)), frameon=False
    )
    return figure


def errors(result: Comparison) -> Figure:
    """The error of each kernel at the longest length it was measured at, beside the plain average."""
    measured = [row for row in result.rows if row.relative_error is not None]
    tokens = max((row.tokens for row in measured), default=0)
    bars = {row.kernel: row for row in measured if row.tokens == tokens}
    figure = Figure(figsize=(7, 0.6 + 0.4 * len(bars)), layout="constrained")
    axis = figure.subplots()
    heights = [row.relative_error or 0.0 for row in bars.values()]
    axis.barh(list(bars), heights, color=[COLOURS[i % len(COLOURS)] for i in range(len(bars))])
    for i, height in enumerate(heights):
        axis.text(height, i, f" {height:.2g}", va="center")
    if bars:
        axis.axvline(next(iter(bars.values())).baseline_error or 0.0, color="#222222", linestyle="--")
    axis.set(xlabel=f"relative error at {tokens} tokens (dashed: plain average)", xscale="symlog", xlim=(0, None))
    axis.margins(x=0.15)
    axis.invert_yaxis()
    return figure


def maps(matrices: dict[str, Tensor]) -> Figure:
    """Attention matrices side by side, each on the colour scale of its own largest weight."""
    columns = min(4, len(matrices))
    lines = -(-len(matrices) // columns)
    figure = Figure(figsize=(2.7 * columns, 2.9 * lines), layout="constrained")
    for axis, (name, matrix) in zip(figure.subplots(lines, columns, squeeze=False).flat, matrices.items()):
        weights = matrix.detach().float()
        image = axis.imshow(weights.clamp_min(0).sqrt().numpy(), cmap="magma", interpolation="nearest", vmin=0)
        axis.set(title="softmax, exact" if name == "exact" else name, xticks=[], yticks=[])
        figure.colorbar(image, ax=axis, shrink=0.7).set_label("root of weight", fontsize=7)
    for axis in figure.axes[: lines * columns]:
        axis.set_axis_on() if axis.has_data() else axis.set_axis_off()
    return figure
