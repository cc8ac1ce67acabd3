"""Text for messages: counts, short paths, and file names that are not valid Unicode."""

import os
from pathlib import Path


def counted(number: int, noun: str, many: str = "") -> str:
    """1 image, 2 images; 1 person, 2 people."""
    return f"{number} {noun if number == 1 else many or noun + 's'}"


def printable(text: str) -> str:
    """Text that every terminal and file takes: bytes of a file's name that are no UTF-8 become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def short(file: str | os.PathLike[str]) -> str:
    """A path as seen from the current folder, where it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
