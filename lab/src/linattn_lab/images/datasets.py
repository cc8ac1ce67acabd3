"""Images with classes, from one of the named sets or the user's own folder, all in one form."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import DSPRITES_CLASSES, FASHION_CLASSES, dsprites, fashion_mnist
from .shapes import SHAPE_CLASSES, generate

NAMES = ("shapes", "fashion", "dsprites")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")


@dataclass
class Part:
    """Images (N, channels, height, width) float32 from 0 to 1, classes (N,) int64, and ground truth where there is any."""

    images: Tensor
    labels: Tensor
    truth: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, places: Tensor) -> "Part":
        """The images at these places (or of this slice of them)."""
        truth = {name: values[places.numpy()] for name, values in self.truth.items()}
        return Part(self.images[places], self.labels[places], truth)


@dataclass
class ImageSet:
    """What to train on and what to judge by. `name` is what `load` was given."""

    name: str
    classes: tuple[str, ...]
    train: Part
    test: Part

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]


def load(
    source: str | os.PathLike[str],
    *,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    side: int = 32,
    grey: bool = False,
    fetch: bool = True,
) -> ImageSet:
    """Images by name ("shapes", "fashion", "dsprites") or out of a folder that holds a folder of images for each class.

    >>> shapes = load("shapes", train=600, test=120)
    >>> shapes.train.images.shape, shapes.classes[0]
    (torch.Size([600, 1, 32, 32]), 'circle')

    Args:
        train, test: how many images, by default all of them (30000 and 6000 shapes; 50000 and 10000 dSprites). Of a
            folder a fifth is for the test where nothing is said.
        seed: of which images are taken, and of the shapes themselves.
        side: images of a folder are scaled to fit a square of this many pixels.
        grey: images of a folder without their colours.
        fetch: download what is missing into the cache.
    """
    for name, count in (("train", train), ("test", test)):
        if count is not None and count < 1:
            raise ValueError(f"{name} must be a positive number of pictures, got {count}.")
    if source == "shapes":
        return _shapes(train or 30000, test or 6000, seed)
    if source == "fashion":
        return _fashion(train, test, seed, fetch)
    if source == "dsprites":
        return _dsprites(train or 50000, test or 10000, seed, fetch)
    if not Path(source).is_dir():
        raise ValueError(f"pictures must be one of {', '.join(NAMES)} or a folder, got {os.fspath(source)!r}.")
    return _folder(Path(source), train, test, seed, side, grey)


def _shapes(train: int, test: int, seed: int) -> ImageSet:
    drawn = generate(train + test, seed)
    whole = Part(torch.from_numpy(drawn.images), torch.from_numpy(drawn.labels), drawn.truth)
    return ImageSet(
        "shapes", SHAPE_CLASSES, whole.take(torch.arange(train)), whole.take(torch.arange(train, train + test))
    )


def _fashion(train: int | None, test: int | None, seed: int, fetch: bool) -> ImageSet:
    parts = []
    for split, count in (("train", train), ("test", test)):
        images, labels = fashion_mnist(split, fetch=fetch)
        chosen = _choose(len(labels), count, seed)
        parts.append(Part(_scaled(images[chosen][:, None]), torch.from_numpy(labels[chosen].astype(np.int64))))
    return ImageSet("fashion", FASHION_CLASSES, *parts)


def _dsprites(train: int, test: int, seed: int, fetch: bool) -> ImageSet:
    images, labels, truth = dsprites(train + test, seed, fetch=fetch)
    whole = Part(_scaled(images[:, None], 1), torch.from_numpy(labels.astype(np.int64)), truth)
    return ImageSet(
        "dsprites", DSPRITES_CLASSES, whole.take(torch.arange(train)), whole.take(torch.arange(train, train + test))
    )


def _choose(there: int, count: int | None, seed: int) -> np.ndarray:
    """Places of `count` images among all that are there, in random order; all of them in their own order for None."""
    if count is None:
        return np.arange(there)
    if count > there:
        raise ValueError(f"{count} pictures were asked for, and there are {there}.")
    return np.random.default_rng(seed).permutation(there)[:count]


def _scaled(images: np.ndarray, top: int = 255) -> Tensor:
    return torch.from_numpy(images.astype(np.float32) / top)


def _folder(folder: Path, train: int | None, test: int | None, seed: int, side: int, grey: bool) -> ImageSet:
    """Reads folder/class/picture; files that Pillow cannot read are named on stderr and left out."""
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if len(classes) < 2:
        raise ValueError(f"{folder} must hold a folder of pictures for each of two or more classes; found {classes}.")
    images, labels, broken = [], [], []  # type: list[np.ndarray], list[int], list[Path]
    for label, name in enumerate(classes):
        files = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        for path in files:
            try:
                images.append(read_picture(path, side, grey))
                labels.append(label)
            except OSError as error:
                broken.append(path)
                print(f"linattn: left out {path}: {error}", file=sys.stderr)
        if label not in labels:
            raise ValueError(f"{folder / name} holds no picture that can be read ({', '.join(SUFFIXES)}).")
    if broken:
        print(f"linattn: {len(broken)} of {len(broken) + len(images)} pictures could not be read", file=sys.stderr)
    test = test or max(1, len(images) // 5)
    train = train or len(images) - test
    chosen = _choose(len(images), train + test, seed)
    whole = Part(_scaled(np.stack(images)[chosen]), torch.tensor(labels)[torch.from_numpy(chosen)])
    return ImageSet(
        os.fspath(folder), classes, whole.take(torch.arange(train)), whole.take(torch.arange(train, train + test))
    )


def read_picture(path: str | os.PathLike[str], side: int = 32, grey: bool = False) -> np.ndarray:
    """One image (3 or 1, side, side) uint8: scaled to fit, the rest filled with black. OSError if it cannot be read."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            picture = ImageOps.pad(opened.convert("L" if grey else "RGB"), (side, side), Image.Resampling.BILINEAR)
    except (SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's names for damaged files
        raise OSError(str(error)) from error
    pixels = np.asarray(picture)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
