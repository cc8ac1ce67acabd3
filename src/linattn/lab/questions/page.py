"""Pictures of answers, and one page of them all."""

import base64
import html
import io
from collections.abc import Iterable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .._commandline import write_file
from .answer import Answer, say

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
img { max-width: 100%; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.25rem 0.6rem; border-bottom: 1px solid #ddd; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.off { color: #b00; }
h2 { margin-top: 3rem; }
"""


def make_figure(answer: Answer) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    answer.draw(figure)
    figure.suptitle(answer.question, fontweight="bold")
    return figure


def save_picture(answer: Answer, path: Path) -> None:
    figure = make_figure(answer)
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=130))


def write_page(answers: Iterable[Answer], path: Path) -> None:
    """A page that needs no other file."""
    parts = [_section(answer) for answer in answers]
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Questions about attention</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>Questions about attention</h1>\n"
        "<p>What the theory says beside what was measured on this machine.</p>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _section(answer: Answer) -> str:
    data = io.BytesIO()
    make_figure(answer).savefig(data, format="png", dpi=110)
    image = base64.b64encode(data.getvalue()).decode()
    rows = "".join(
        f"<tr><td>{html.escape(f.statement)}</td><td class=number>{say(f.predicted)}</td>"
        f"<td class=number>{say(f.measured)}</td>{'<td>yes' if f.agrees else '<td class=off>no'}</td></tr>"
        for f in answer.findings
    )
    return (
        f"<h2>{html.escape(answer.question)}</h2>\n<p>{html.escape(answer.text)}</p>\n"
        f'<img alt="{html.escape(answer.question)}" src="data:image/png;base64,{image}">\n'
        f"<table><tr><th></th><th>theory</th><th>measured</th><th>agree</th></tr>{rows}</table>"
    )
