"""HTML pages in one file each: Jinja2 templates on one base and one style sheet. Nothing is loaded from elsewhere.

A page is a template that extends `base.html.j2` and fills its block `body`; `macros.html.j2` has tables and plots. A plot
of lines and bars alone becomes a chart where scripts run: values under the pointer, series to hide, logarithmic or linear
axes (`chart.js`).
"""

import base64
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._commandline import require
from .._files import write_text
from .charts import charts_of

HERE = Path(__file__).parent

# What matplotlib draws lines and text with on a dark page; the background is the page's own.
DARK: dict[Any, str] = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#e6e6e6"
) | {"grid.color": "#6b7078"}


def render_page(template: str | os.PathLike[str], *, title: str, **values: object) -> str:
    """A page from a template file; all values are escaped. Needs Jinja2, part of the extra `pages`.

    Args:
        template: path of the template. It may extend and import the templates of this folder and of its own.
        values: what the template uses.
    """
    require("jinja2")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    path = Path(template)
    environment = Environment(
        loader=FileSystemLoader([path.parent, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["chart_script"] = (HERE / "chart.js").read_text(encoding="utf-8")
    return environment.get_template(path.name).render(title=title, **values)


def write_page(path: str | os.PathLike[str], template: str | os.PathLike[str], *, title: str, **values: object) -> None:
    """Writes the page of `render_page` to a file, whose folder is made if need be."""
    text = render_page(template, title=title, **values)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Bytes of a file name that are not UTF-8 become question marks.
    write_text(path, text.encode("utf-8", "replace").decode("utf-8"))


class Plot(str):
    """The address of an image inside the page, and the charts that may take its place: see `charts_of`."""

    charts: list[dict[str, Any]]


def plot_address(figure: Any, dpi: int = 110) -> Plot:
    """The address of a matplotlib figure as an image inside the page, with its charts."""
    plot = Plot(_figure_address(figure, dpi=dpi))
    plot.charts = charts_of(figure)
    return plot


def themed_plot(draw: Callable[[], Any], dpi: int = 160) -> dict[str, Any]:
    """Addresses `light` and `dark` of a matplotlib figure, drawn once for each, on the background of the page.

    `charts` are those that may take its place.
    """
    from matplotlib import rc_context

    found: dict[str, Any] = {}
    for theme, colours in {"light": {}, "dark": DARK}.items():
        with rc_context(colours):
            figure = draw()
            found[theme] = _figure_address(figure, dpi=dpi, transparent=True)
            found.setdefault("charts", charts_of(figure))
    return found


def _figure_address(figure: Any, **options: object) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", **options)
    return data_address(buffer.getvalue())


def data_address(data: bytes, kind: str = "image/png") -> str:
    """The address of data that is part of the page."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
