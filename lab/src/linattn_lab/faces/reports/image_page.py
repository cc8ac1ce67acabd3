"""Pages of images in one file: clusters, search results, pairs around the threshold."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from linattn import pages

from .contact_sheet import Group, Shown, thumbnail

TEMPLATE = Path(__file__).with_name("image_page.html.j2")


@dataclass(frozen=True)
class PairKind:
    """Pairs under one title; a line below each pair, green if `good`, else red."""

    title: str
    good: bool
    pairs: Sequence[tuple[Shown, Shown, str]]


def write_image_page(
    path: Path,
    title: str,
    notes: Sequence[str],
    *,
    groups: Iterable[Group] = (),
    pairs: Sequence[PairKind] = (),
    rows: Sequence[Sequence[str]] = (),
    histogram: str = "",
    most: int = 60,
) -> None:
    """Writes a page of groups and pairs of images.

    Args:
        notes: paragraphs at the top.
        rows: a table, heading first.
        histogram: address of a plot.
        most: images shown of a group; the others are counted.
    """
    shown = [
        {
            "title": group.title,
            "images": [_image(picture) for picture in group.pictures[:most]],
            "hidden": len(group.pictures) - most,
        }
        for group in groups
    ]
    kinds = [
        {
            "title": kind.title,
            "good": kind.good,
            "pairs": [{"first": _image(a), "second": _image(b), "text": text} for a, b, text in kind.pairs],
        }
        for kind in pairs
    ]
    values = {"notes": notes, "rows": rows, "histogram": histogram, "groups": shown, "pairs": kinds}
    pages.write_page(path, TEMPLATE, title=title, **values)


def _image(picture: Shown) -> dict[str, str]:
    """A thumbnail with its caption and a link to the file itself."""
    data = io.BytesIO()
    thumbnail(picture.file, 120).save(data, "JPEG", quality=85)
    path = Path(picture.file)
    return {
        "mark": picture.mark,
        "link": path.absolute().as_uri(),
        "name": path.name,
        "file": picture.file,
        "text": picture.text,
        "address": pages.data_address(data.getvalue(), "image/jpeg"),
    }
