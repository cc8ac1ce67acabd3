"""Images as tiles with captions, and a sheet of samples."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ..commandline import write_file
from ..plotting import new_figure
from .datasets import ImageSet

STEP = 1.1  # from tile to tile, in widths of a tile


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a PNG of 128 colours: noise compresses badly, and more colours are not visible."""
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=90)
    small = Image.open(whole).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    write_file(path, lambda temporary: small.save(temporary, "PNG", optimize=True))


def draw_tiles(
    axis: Axes, images: Tensor, columns: int, *, above: Sequence[str] = (), below: Sequence[str] = (), room: float = 0.0
) -> None:
    """Images (N, 1 or 3, H, W) in rows on one axis, with words above and, in red, below; `room` is left for them."""
    for place, image in enumerate(images):
        left, top = place % columns * STEP, place // columns * (STEP + room)
        pixels = image.permute(1, 2, 0).numpy()
        axis.imshow(
            pixels[..., 0] if pixels.shape[-1] == 1 else pixels,
            extent=(left, left + 1, top + 1, top),
            cmap="gray",
            vmin=0,
            vmax=1,
        )
        if place < len(above):
            axis.text(left + 0.5, top - 0.04, above[place], ha="center", va="bottom", fontsize=8)
        if place < len(below):
            axis.text(left + 0.5, top + 1.04, below[place], ha="center", va="top", fontsize=7.5, color="#b00020")
    rows = -(-len(images) // columns)
    axis.set(xlim=(-0.05, columns * STEP - 0.05), ylim=(rows * (STEP + room) - room / 2, -0.05 - room / 2))
    axis.set_aspect("equal")
    axis.axis("off")


def sample_sheet(images: ImageSet, columns: int = 12) -> Figure:
    """Test images, a row for each class; from little noise to much where the noise is known."""
    classes = images.classes[:12]
    names = [name.replace("_", " ") for name in classes]
    margin = 0.3 + 0.13 * max(len(name) for name in names)  # for the names, in widths of a tile
    figure = new_figure((columns * STEP + margin) * 0.71, len(classes) * 0.85 + 0.2)
    axes = figure.subplots(len(classes), 1, squeeze=False)[:, 0]
    labels = images.test.labels.numpy()
    for label, axis in enumerate(axes):
        mine = np.flatnonzero(labels == label)[: columns * 20]
        if "noise" in images.test.truth:
            mine = mine[np.argsort(images.test.truth["noise"][mine], kind="stable")]
        spread = np.linspace(0, len(mine) - 1, min(columns, len(mine))).astype(int)
        draw_tiles(axis, images.test.images[mine[spread]], columns)
        axis.set_xlim(left=-margin)
        axis.text(-0.2, 0.5, names[label], ha="right", va="center")
    return figure
