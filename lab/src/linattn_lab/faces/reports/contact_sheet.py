"""Thumbnails, and a contact sheet of clusters in one picture."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ...commandline import write_file
from ..images import open_image
from ..text import printable

PAPER, INK, FAINT, WRONG = "#ffffff", "#222222", "#eeeeee", "#d9480f"
EDGE, GAP, LINE = 84, 6, 22


@dataclass(frozen=True)
class Shown:
    """An image on a sheet or a page."""

    file: str
    text: str = ""
    mark: str = ""  # "wrong": it does not belong with its neighbours; "far": beyond the threshold


@dataclass(frozen=True)
class Group:
    """Images that belong together, and a line about them."""

    title: str
    pictures: Sequence[Shown]


def thumbnail(path: str | os.PathLike[str], edge: int = EDGE) -> Image.Image:
    """An image of at most edge x edge pixels, whole; a blank one if the file is gone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd metadata
            with Image.open(path) as file:
                file.draft("RGB", (2 * edge, 2 * edge))  # a large JPEG is decoded at an eighth of its size
                image = open_image(ImageOps.exif_transpose(file)).convert("RGB")
    except (ValueError, OSError):
        blank = Image.new("RGB", (edge, edge), FAINT)
        ImageDraw.Draw(blank).text((edge / 2, edge / 2), "gone", INK, anchor="mm")
        return blank
    return ImageOps.contain(image, (edge, edge), Image.Resampling.LANCZOS)


def draw_sheet(title: str, groups: Sequence[Group], path: Path, *, columns: int = 12, most: int = 100) -> None:
    """A contact sheet: a line of text and a row of images for each group; what does not fit is counted in words.

    Args:
        columns: images of a group at most.
        most: groups at most; the image would not open beyond some.
    """
    row = LINE + EDGE + 2 * GAP
    width = columns * (EDGE + GAP) + 3 * GAP
    shown = groups[:most]
    sheet = Image.new("RGB", (width, 2 * LINE + len(shown) * row + (LINE if len(groups) > most else 0) + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((2 * GAP, GAP), printable(title), INK, font=_font(15))
    font = _font(12)
    top = 2 * LINE
    for group in shown:
        hidden = len(group.pictures) - columns
        text = group.title + (f", {hidden} of them not shown" if hidden > 0 else "")
        draw.text((2 * GAP, top), printable(text), INK, font=font)
        for place, picture in enumerate(group.pictures[:columns]):
            image = thumbnail(picture.file)
            left = 2 * GAP + place * (EDGE + GAP) + (EDGE - image.width) // 2
            upper = top + LINE + (EDGE - image.height) // 2
            sheet.paste(image, (left, upper))
            if picture.mark == "wrong":
                corners = (left - 3, upper - 3, left + image.width + 2, upper + image.height + 2)
                draw.rectangle(corners, outline=WRONG, width=3)
        top += row
    if len(groups) > most:
        draw.text((2 * GAP, top), f"and {len(groups) - most} more", INK, font=font)
    write_file(path, lambda temporary: sheet.save(temporary))


def _font(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib brings a font with more alphabets than Pillow's own."""
    from matplotlib import get_data_path

    return ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", size)
