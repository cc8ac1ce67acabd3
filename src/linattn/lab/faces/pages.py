"""Pages of pictures that need no other file: clusters, search results, pairs around the threshold."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from ...measure.page import page
from .._commandline import write_file
from .sheet import Group, Shown, thumbnail
from .words import printable

STYLE = """<style>
body{max-width:76rem}
section{margin:1.2rem 0}section h3{font-size:1rem;font-weight:600;margin:.3rem 0}
.row{display:flex;flex-wrap:wrap;gap:.5rem}
figure{margin:0;width:6.2rem;text-align:center}figure img{max-width:100%;border-radius:4px;display:block;margin:0 auto}
figure.wrong img{outline:3px solid #d9480f}figure.far{opacity:.45}
figcaption{font-size:.75rem;color:#555;overflow-wrap:anywhere;line-height:1.25;margin-top:.2rem}
.pair{display:inline-block;vertical-align:top;border:1px solid #ddd;border-radius:6px;padding:.5rem .5rem .3rem;
margin:0 .5rem .6rem 0}
.pair .row{flex-wrap:nowrap}.pair p{margin:.2rem 0 0;text-align:center;font-size:.85rem}
.good{color:#2b8a3e}.bad{color:#d9480f}
</style>"""


def figure(picture: Shown) -> str:
    """A thumbnail with its text, which leads to the file itself."""
    data = io.BytesIO()
    thumbnail(picture.file, 120).save(data, "JPEG", quality=85)
    image = base64.b64encode(data.getvalue()).decode()
    name = html.escape(Path(picture.file).name)
    return (
        f'<figure class="{picture.mark}"><a href="{html.escape(Path(picture.file).absolute().as_uri())}">'
        f'<img alt="{name}" title="{html.escape(picture.file)}" loading="lazy" src="data:image/jpeg;base64,{image}"></a>'
        f"<figcaption>{html.escape(picture.text)}</figcaption></figure>"
    )


def section(group: Group, most: int = 60) -> str:
    """A line of text and the pictures; beyond `most` they are counted."""
    hidden = len(group.pictures) - most
    more = f'<p class="note">{hidden} more are not shown.</p>' if hidden > 0 else ""
    figures = "".join(figure(picture) for picture in group.pictures[:most])
    return f'<section><h3>{html.escape(group.title)}</h3><div class="row">{figures}</div>{more}</section>'


def pair(first: Shown, second: Shown, text: str, good: bool) -> str:
    """Two pictures side by side with a line below, green for right and red for wrong."""
    kind = "good" if good else "bad"
    return (
        f'<div class="pair"><div class="row">{figure(first)}{figure(second)}</div>'
        f'<p class="{kind}">{html.escape(text)}</p></div>'
    )


def note(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    text = printable(page(title, [STYLE, *parts]))
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
