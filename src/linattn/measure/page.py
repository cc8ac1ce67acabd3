"""Self-contained pages: text, tables and pictures in one HTML file."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import torch

from .._functional import implied_attention
from ..nearfar import NearFar
from .compare import Comparison

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}
img{max-width:100%;height:auto}p.note{color:#555;font-size:.9rem}"""


def page(title: str, parts: Sequence[str]) -> str:
    """An HTML page of ready parts."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def heading(text: str, note: str = "") -> str:
    return f"<h2>{html.escape(text)}</h2>" + (f'<p class="note">{html.escape(note)}</p>' if note else "")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(str(x))}</th>" for x in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def picture(figure: Any, alt: str) -> str:
    """A matplotlib figure as an image inside the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></p>'


def comparison_page(result: Comparison) -> str:
    """The page of `linattn compare --html`."""
    from . import plots

    about, setting = result.machine, result.setting
    form = f"{'causal' if setting['causal'] else 'non-causal'}, {'forward + backward' if setting['backward'] else 'forward'}"
    parts = [
        f"<p>{html.escape(form)}; batch {setting['batch']}, {setting['heads']} heads, dim {setting['dim']}, float32; "
        f"torch {about['torch']}, {html.escape(str(about['processor']))}, {about['threads']} threads.</p>",
        heading("Time and memory", "Softmax is torch's scaled_dot_product_attention, measured in the same run."),
        picture(plots.growth(result), "time, memory and speed-up against the number of tokens"),
        table(
            ["kernel", "engine", "crossover (tokens)", "growth exponent"],
            [
                [s["kernel"], s["engine"], _number(s["crossover"], ".0f"), _number(s["exponent"], ".2f")]
                for s in result.summary()
            ],
        ),
        heading(
            "Error",
            "Relative error of the output against exact softmax on Gaussian queries and keys. The dashed line is the plain "
            "average of the values, which needs no kernel: a bar above it is worse than not looking at all.",
        ),
        picture(plots.errors(result), "relative error of each kernel beside the plain average"),
        heading("Attention maps", "The N x N matrix that each kernel implies, for 96 tokens that drift slowly."),
        picture(plots.maps(_maps(result)), "attention maps of the kernels beside softmax"),
        heading("All figures"),
        table(
            ["kernel", "engine", "tokens", "ms", "x softmax", "peak extra MiB", "error", "plain average"],
            [
                [
                    r.kernel,
                    r.engine,
                    r.tokens,
                    f"{r.seconds * 1e3:.2f}",
                    f"{r.speedup:.2f}",
                    _number(None if r.peak_bytes is None else r.peak_bytes / 2**20, ".1f"),
                    _number(r.relative_error, ".3g"),
                    _number(r.baseline_error, ".3g"),
                ]
                for r in [*result.softmax, *result.rows]
            ],
        ),
    ]
    return page("Linear attention beside softmax", parts)


def _maps(result: Comparison) -> dict[str, torch.Tensor]:
    """Attention matrices of a short, structured sequence: neighbours are alike, so that there is something to see."""
    dim = int(str(result.setting["dim"]))
    steps = torch.randn(96, dim, generator=torch.Generator().manual_seed(0)) / 4
    walk = (steps.cumsum(0) - steps.cumsum(0).mean(0)).unsqueeze(0)
    x = walk / walk.std() * 1.5
    causal = bool(result.setting["causal"])
    names = ["exact", *dict.fromkeys(row.kernel for row in result.rows)]
    # 96 tokens would all be near: a small near/far shows what it does to far ones.
    kernels = {"near/far": NearFar(window=8, slots=8, sinks=2, block=8)}
    return {name: implied_attention(x, x, kernels.get(name, name), is_causal=causal)[0] for name in names}


def _number(x: object, spec: str) -> str:
    return "" if x is None else format(x, spec)
