"""Images of six shapes in noise, drawn from a seed, with everything that was drawn kept as ground truth."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SHAPE_CLASSES = ("circle", "square", "rectangle", "right_triangle", "heart", "ellipse")
TRUTH = ("noise", "size", "x", "y", "angle")
ASPECT = (1.5, 2.0)  # of the longer to the shorter side of rectangles and ellipses
CHUNK = 2000  # images drawn at once; part of what a seed means, since noise is drawn chunk by chunk


@dataclass
class Shapes:
    """Images (N, 1, side, side) float32 from 0 to 1, classes (N,) int64, and what each was drawn from.

    truth holds arrays (N,): `noise` is its standard deviation, `size` the radius in pixels of a circle of the same area,
    `x` and `y` the place of the centre of gravity in pixels from the image's centre, `angle` in degrees.
    """

    images: np.ndarray
    labels: np.ndarray
    truth: dict[str, np.ndarray]


def generate(
    count: int,
    seed: int = 0,
    *,
    noise: tuple[float, float] = (0.0, 0.35),
    size: tuple[float, float] = (4.0, 7.5),
    side: int = 32,
    dark: float = 0.2,
    light: float = 0.8,
) -> Shapes:
    """Draws `count` images, as many of each class as can be, in random order.

    >>> shapes = generate(600, seed=1)
    >>> shapes.images.shape, sorted(shapes.truth)
    ((600, 1, 32, 32), ['angle', 'noise', 'size', 'x', 'y'])

    Args:
        noise: least and largest standard deviation; each image's is drawn evenly from between.
        size: least and largest radius of a circle of the same area, in pixels; the same.
        side: of the square picture.
        dark, light: of the ground and of the shape, before noise; the sum is cut off at 0 and 1.
    """
    for name, (low, high) in (("noise", noise), ("size", size)):
        if not 0 <= low <= high:
            raise ValueError(f"{name} must be a range (low, high) with 0 <= low <= high, got {(low, high)}.")
    if count < 0 or side < 8:
        raise ValueError(f"count must not be negative and side at least 8, got {count} and {side}.")
    if size[0] <= 0 or REACH * size[1] > side / 2:
        raise ValueError(f"size must be above 0 and at most {side / 2 / REACH:.1f} for pictures of {side}, got {size}.")
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(count) % len(SHAPE_CLASSES))
    truth = {
        "noise": generator.uniform(*noise, count),
        "size": generator.uniform(*size, count),
        "angle": generator.uniform(0, 360, count),
    }
    room = side / 2 - REACH * truth["size"]
    truth |= {"x": generator.uniform(-room, room), "y": generator.uniform(-room, room)}
    aspect = generator.uniform(*ASPECT, count)
    images = np.empty((count, 1, side, side), np.float32)
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        inside = _cover(labels[part], {name: values[part] for name, values in truth.items()}, aspect[part], side)
        grain = generator.standard_normal(inside.shape, np.float32) * truth["noise"][part, None, None].astype(
            np.float32
        )
        images[part, 0] = np.clip(dark + (light - dark) * inside + grain, 0, 1)
    return Shapes(images, labels.astype(np.int64), {name: truth[name].astype(np.float32) for name in TRUTH})


def _cover(labels: np.ndarray, truth: dict[str, np.ndarray], aspect: np.ndarray, side: int) -> np.ndarray:
    """Share of each pixel that is inside the shape, (N, side, side): what smooths the edge."""
    axis = (np.arange(side, dtype=np.float32) - (side - 1) / 2).astype(np.float32)
    inside = np.empty((len(labels), side, side), np.float32)
    for label, distance in enumerate(DISTANCES):
        mine = np.flatnonzero(labels == label)
        size, x, y, turn, ratio = (
            values[mine, None, None].astype(np.float32)
            for values in (truth["size"], truth["x"], truth["y"], np.radians(truth["angle"]), aspect)
        )
        across, down = (axis[None, None, :] - x) / size, (axis[None, :, None] - y) / size
        u = np.cos(turn) * across + np.sin(turn) * down
        v = np.cos(turn) * down - np.sin(turn) * across
        inside[mine] = np.clip(0.5 - size * distance(u, v, ratio), 0, 1)
    return inside


# Signed distances to shapes of area pi about their centre of gravity: negative inside.


def _circle(u: np.ndarray, v: np.ndarray, aspect: np.ndarray) -> np.ndarray:
    return np.hypot(u, v) - 1


def _box(u: np.ndarray, v: np.ndarray, half_u: np.ndarray | float, half_v: np.ndarray | float) -> np.ndarray:
    out_u, out_v = np.abs(u) - half_u, np.abs(v) - half_v
    return np.hypot(np.maximum(out_u, 0), np.maximum(out_v, 0)) + np.minimum(np.maximum(out_u, out_v), 0)


def _square(u: np.ndarray, v: np.ndarray, aspect: np.ndarray) -> np.ndarray:
    return _box(u, v, math.sqrt(math.pi) / 2, math.sqrt(math.pi) / 2)


def _rectangle(u: np.ndarray, v: np.ndarray, aspect: np.ndarray) -> np.ndarray:
    return _box(u, v, np.sqrt(math.pi * aspect) / 2, np.sqrt(math.pi / aspect) / 2)


def _right_triangle(u: np.ndarray, v: np.ndarray, aspect: np.ndarray) -> np.ndarray:
    """Legs along u and v from the right angle; the centre of gravity is a third of each leg away from it."""
    leg_u, leg_v = np.sqrt(2 * math.pi * aspect / ASPECT[0]), np.sqrt(2 * math.pi / aspect * ASPECT[0])
    u, v = u + leg_u / 3, v + leg_v / 3
    slope = (u * leg_v + v * leg_u - leg_u * leg_v) / np.hypot(leg_u, leg_v)
    return np.maximum(np.maximum(-u, -v), slope)


HEART = math.sqrt(math.pi / (1 + math.pi / 4))  # side of the square between the heart's two half circles
HEART_CENTRE = HEART * (math.pi / 16 + 1 / 12) / (1 + math.pi / 4)


def _heart(u: np.ndarray, v: np.ndarray, aspect: np.ndarray) -> np.ndarray:
    """A square with a half circle on two neighbouring sides."""
    u, v = u + HEART_CENTRE, v + HEART_CENTRE
    lobes = np.minimum(np.hypot(u - HEART / 2, v), np.hypot(u, v - HEART / 2)) - HEART / 2
    return np.minimum(lobes, _box(u, v, HEART / 2, HEART / 2))


def _ellipse(u: np.ndarray, v: np.ndarray, aspect: np.ndarray) -> np.ndarray:
    """To first order at the edge, which is all that a pixel sees."""
    axis_u, axis_v = np.sqrt(aspect), np.sqrt(1 / aspect)
    scaled = np.maximum(np.hypot(u / axis_u, v / axis_v), 1e-6)
    return scaled * (scaled - 1) / np.maximum(np.hypot(u / axis_u**2, v / axis_v**2), 1e-6)


DISTANCES: tuple[Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], ...] = (
    _circle,
    _square,
    _rectangle,
    _right_triangle,
    _heart,
    _ellipse,
)
# How far a shape of size 1 can reach from its centre: the sharp corner of the longest triangle.
_LONGEST = ASPECT[1] / ASPECT[0]
REACH = math.hypot(2 * math.sqrt(2 * math.pi * _LONGEST) / 3, math.sqrt(2 * math.pi / _LONGEST) / 3)
