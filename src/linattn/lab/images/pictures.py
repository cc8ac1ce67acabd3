"""Pictures on a page: tiles with their captions, and a sheet of samples."""

from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from .sets import ImageSet


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def show(axis: Any, image: Tensor) -> None:
    """One picture (1 or 3, H, W) from 0 to 1 without ticks."""
    pixels = image.permute(1, 2, 0).numpy()
    axis.imshow(pixels[..., 0] if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    for side in axis.spines.values():
        side.set_visible(False)


def sample_sheet(images: ImageSet, columns: int = 12) -> Figure:
    """Test pictures of every class in a row; from little noise to much where the noise is known."""
    classes = images.classes[:12]
    figure = new_figure(columns * 0.78 + 1.2, len(classes) * 0.8 + 0.3)
    grid = figure.subplots(len(classes), columns, squeeze=False)
    labels = images.test.labels.numpy()
    for label, row in enumerate(grid):
        mine = np.flatnonzero(labels == label)[: columns * 20]
        if "noise" in images.test.truth:
            mine = mine[np.argsort(images.test.truth["noise"][mine], kind="stable")]
        chosen = mine[np.linspace(0, len(mine) - 1, columns).astype(int)] if len(mine) >= columns else mine
        for axis in row[len(chosen) :]:
            axis.axis("off")
        for axis, place in zip(row, chosen):
            show(axis, images.test.images[place])
        row[0].axis("on")
        row[0].set(xticks=[], yticks=[])
        row[0].set_ylabel(classes[label].replace("_", " "), rotation=0, ha="right", va="center")
    return figure
