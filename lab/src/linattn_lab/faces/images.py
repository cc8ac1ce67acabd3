"""Images from files: any folder, size and format that Pillow reads; broken ones are named and left out."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

Source = str | os.PathLike[str] | Image.Image


@dataclass
class Pictures:
    """Images of a folder that could be read, whose they are, and those that could not be read, with the reason."""

    paths: list[Path] = field(default_factory=list)
    people: list[str | None] = field(default_factory=list)
    images: list[Image.Image] = field(default_factory=list)
    broken: list[tuple[Path, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.images)

    def labels(self) -> tuple[Tensor, list[str]]:
        """People as numbers (N,) and their names in the order of the numbers. All images must have a person."""
        missing = [path for path, person in zip(self.paths, self.people, strict=True) if person is None]
        if missing:
            raise ValueError(f"{missing[0]} has no person: put pictures into a folder for each person.")
        names = sorted({str(person) for person in self.people})
        number = {name: i for i, name in enumerate(names)}
        return torch.tensor([number[str(person)] for person in self.people], dtype=torch.long), names

    def report(self) -> str:
        """One sentence with the count of what was read, and a line for each broken file."""
        people = {person for person in self.people if person is not None}
        text = f"{len(self)} pictures" + (f" of {len(people)} people" if people else "")
        if self.broken:
            text += f", {len(self.broken)} skipped:" + "".join(f"\n  {path}: {reason}" for path, reason in self.broken)
        return text


def scan(folder: str | os.PathLike[str]) -> list[tuple[Path, str | None]]:
    """Files of a folder with their person, in order of name: `person/picture`, or `picture` with no person (None).

    Hidden files and deeper folders are left alone.
    """
    top = Path(folder)
    if not top.is_dir():
        raise ValueError(f"{top} is not a folder.")
    found: list[tuple[Path, str | None]] = []
    for entry in sorted(top.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            inside = sorted(path for path in entry.iterdir() if path.is_file() and not path.name.startswith("."))
            found += [(path, entry.name) for path in inside]
        elif entry.is_file():
            found.append((entry, None))
    return found


def open_image(source: Source) -> Image.Image:
    """An image, upright by its EXIF rotation, as grey ("L") or colour ("RGB"). Raises ValueError if it cannot be read."""
    if isinstance(source, Image.Image):
        return _plain(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd metadata; what cannot be read raises
            with Image.open(source) as image:
                image.load()
                return _plain(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise ValueError(f"{os.fspath(source)} does not exist.") from None
    except Exception as error:  # Pillow's readers of rarer formats raise anything on damaged files
        raise ValueError(f"{os.fspath(source)} is not a picture that can be read: {error}") from error


def read_folder(folder: str | os.PathLike[str], size: tuple[int, int] | None = None, channels: int = 1) -> Pictures:
    """All images under a folder, `person/picture` or flat. Broken files land in `broken`, never in an error.

    Args:
        size: height and width that each is brought to as it is read, so that photographs need not all fit in memory at
            full size; by default they stay as they are.
        channels: 1 (grey) or 3, where there is a size.
    """
    found = Pictures()
    for path, person in scan(folder):
        try:
            image = open_image(path)
        except ValueError as error:
            found.broken.append((path, str(error.__cause__ or error)))
            continue
        found.paths.append(path)
        found.people.append(person)
        found.images.append(image if size is None else fit(image, size, channels))
    return found


def fit(image: Image.Image, size: tuple[int, int], channels: int = 1) -> Image.Image:
    """Cut from the middle to the shape of `size` (height, width), then made that large; grey or colour."""
    height, width = size
    return ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (width, height), Image.Resampling.BILINEAR)


def to_tensor(images: Sequence[Image.Image], size: tuple[int, int], channels: int = 1) -> Tensor:
    """(N, channels, height, width) from 0 to 1, each made to `fit`."""
    rows = [np.asarray(fit(image, size, channels), np.float32) / 255 for image in images]
    if not rows:
        return torch.empty(0, channels, *size)
    return torch.from_numpy(np.stack(rows)).reshape(len(rows), *size, channels).permute(0, 3, 1, 2).contiguous()


def _plain(image: Image.Image) -> Image.Image:
    if image.mode in ("L", "RGB"):
        return image.copy()
    if image.mode.startswith(("I", "F")):  # 16 bits and more: by range, as Pillow would cut at 255
        values = np.asarray(image, np.float64)
        values = np.nan_to_num(values)
        low, high = float(values.min()), float(values.max())
        return Image.fromarray(np.uint8((values - low) * (255 / max(high - low, 1e-12))))
    if image.mode in ("1", "LA", "La"):
        return image.convert("L")
    return image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")
