"""One plot of the eight variables, hand-set above trained."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from ..plotting import new_figure, save_figure
from .comparison import Comparison
from .numpy_head import Array


def draw(comparison: Comparison, path: Path) -> None:
    """Writes the image; the suffix says the format (png, svg, pdf)."""
    save_figure(make_figure(comparison), path, dpi=130)


def make_figure(c: Comparison) -> Figure:
    names = [name for name, _ in c.hand.items()]
    figure = new_figure(20, 8.2)
    widths = [max(getattr(c.hand, name).shape[1], 2.6) for name in names]
    axes = figure.subplots(2, 8, width_ratios=widths)
    for row, (title, trace) in enumerate((("by hand", c.hand), ("learned", c.learned))):
        for column, name in enumerate(names):
            _matrix(figure, axes[row, column], getattr(trace, name), name, c)
            if row == 0:
                axes[row, column].set_title(name, fontsize=14, fontweight="bold")
        axes[row, 0].set_ylabel(title, fontsize=15, fontweight="bold", labelpad=12)
    figure.suptitle(f"{c.design.name}: {c.design.summary}. Sequence {''.join(c.sequence)}", fontsize=16)
    return figure


def _matrix(figure: Figure, axis: Axes, matrix: Array, name: str, c: Comparison) -> None:
    """Attention runs from 0 to 1; everything else has 0 in white and a scale of its own, the same either side of it."""
    if name == "attention":
        image = axis.imshow(matrix, cmap="Greens", vmin=0, vmax=1, aspect="auto")
    else:
        top = float(np.abs(matrix).max()) or 1.0
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    axis.set_yticks(range(matrix.shape[0]), _row_labels(matrix, name, c), fontsize=10)
    columns = _column_labels(matrix, name, c)
    axis.set_xticks(range(matrix.shape[1]), columns, fontsize=10)
    axis.tick_params(length=0)
    if matrix.size <= 60 or name == "attention":
        _write_numbers(axis, matrix, image)
    figure.colorbar(image, ax=axis, location="bottom", fraction=0.05, pad=0.06).ax.tick_params(
        labelsize=8, labelrotation=45
    )


def _write_numbers(axis: Axes, matrix: Array, image: AxesImage) -> None:
    for (i, j), number in np.ndenumerate(matrix):
        red, green, blue, _ = image.cmap(image.norm(number))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        size = abs(number)
        text = "0" if size < 0.005 else f"{number:.{0 if size >= 9.95 else 1 if size >= 0.995 else 2}f}"
        axis.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")


def _row_labels(matrix: Array, name: str, c: Comparison) -> list[str]:
    if name not in ("Km", "Qm", "Vm"):
        return list(c.sequence)
    places = matrix.shape[0] - len(c.design.selector.alphabet)
    start = [f"place {i + 1}" for i in range(min(places, c.design.max_len + len(c.design.prefix)))]
    end = [f"{i + 1} from end" for i in range(places - len(start))]
    return [*c.design.selector.alphabet, *start, *end]


def _column_labels(matrix: Array, name: str, c: Comparison) -> list[str]:
    if name == "attention":
        return list(c.sequence)
    if name in ("output", "V", "Vm"):
        return list(c.design.output)
    return [str(i + 1) for i in range(matrix.shape[1])]
