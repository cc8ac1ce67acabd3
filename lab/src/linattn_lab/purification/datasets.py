"""The images to fit, to choose by and to test on."""

from collections.abc import Callable

import numpy as np

from ..data import fashion_mnist, orl_faces

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def fashion(train: int, seed: int) -> tuple[str, Parts]:
    """`train` and 1000 held-out images of the training split, 1000 of the test split."""
    rng = np.random.default_rng(seed)
    images, tests = fashion_mnist("train")[0], fashion_mnist("test")[0]
    order = rng.permutation(len(images))
    test = rng.permutation(len(tests))[:1000]
    return "Fashion-MNIST", (_scaled(images[order[:train]]), _scaled(images[order[-1000:]]), _scaled(tests[test]))


def orl(train: int, seed: int) -> tuple[str, Parts]:
    """People 30 / 5 / 5, ten images each; `train` does not matter."""
    faces, people = orl_faces()
    order = np.random.default_rng(seed).permutation(40)
    groups = order[:30], order[30:35], order[35:]
    fit, held_out, test = (_scaled(faces[np.isin(people, group)]) for group in groups)
    return "ORL faces", (fit, held_out, test)


def _scaled(images: np.ndarray) -> np.ndarray:
    return images / 255.0


SPLITS: dict[str, Callable[[int, int], tuple[str, Parts]]] = {"fashion": fashion, "orl": orl}
