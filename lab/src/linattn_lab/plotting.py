"""matplotlib figures without a window, and files of them."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .commandline import write_file


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path, dpi: int = 130) -> None:
    """Writes a figure; the suffix of the path is the format."""
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=dpi))
