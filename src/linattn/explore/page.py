"""The explorer as one HTML file: template, style sheet, modules and data, nothing loaded from elsewhere."""

import json
from pathlib import Path
from typing import Any

from ..pages import render_page

HERE = Path(__file__).parent
PAGES = HERE.parent / "pages"
SAMPLE = HERE / "sample_heads.json"


def modules() -> dict[str, str]:
    """File name -> text of the page's JavaScript modules."""
    files = [*sorted((HERE / "js").glob("*.js")), PAGES / "chart.js"]
    return {path.name: path.read_text(encoding="utf-8") for path in files}


def sample_heads() -> dict[str, Any]:
    """The heads that come with the package: a few of SmolLM2-135M on a short text, in float16."""
    heads: dict[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8"))
    return heads


def explorer_page(
    *, heads: dict[str, Any] | None = None, times: dict[str, Any] | None = None, live: dict[str, Any] | None = None
) -> str:
    """The page.

    Args:
        heads: queries, keys and values of a model, from `linattn.hf.heads.capture_heads`; None takes the sample.
        times: seconds measured on this machine, from `linattn.explore.times.measure_times`.
        live: what a server offers the page; None for a file that stands alone.
    """
    data = {"heads": heads or sample_heads(), "times": times, "live": live}
    # "<" is escaped so that no text in the data can end the script element.
    carried = modules()
    loader = carried.pop("loader.js")
    return render_page(
        HERE / "page.html.j2",
        title="Kernel attention explorer",
        modules=carried,
        loader=loader,
        data=json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
    )
