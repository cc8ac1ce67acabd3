"""The report as one page that needs no other file."""

import base64
import html
import io
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from .._commandline import write_file
from ..images import ImageSet
from ..images.pictures import new_figure, sample_sheet
from . import pictures
from .figures import Findings
from .runs import Outcome, Probing, Run

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
img { max-width: 100%; display: block; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.25rem 0.8rem; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
h2 { margin-top: 2.5rem; }
"""


def write_page(
    path: Path,
    findings: Findings,
    outcome: Outcome,
    images: ImageSet,
    run: Run,
    probing: Probing,
    rows: list[list[str]],
) -> None:
    """Writes the page; `rows` is the table of figures, the heading first."""
    title = f"Prediction depth: {images.name}"
    head, *body = rows
    table = "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>\n"
        for tag, row in (("th", head), *(("td", row) for row in body))
    )
    sections = "\n".join(
        f"<h2>{html.escape(name)}</h2>\n<p>{html.escape(text)}</p>\n{embedded(figure, name)}"
        for name, text, figure in _sections(findings, outcome, images)
    )
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        f"<p>{html.escape(introduction(run, probing, outcome))}</p>\n<table>{table}</table>\n{sections}\n</body></html>\n"
    )
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def introduction(run: Run, probing: Probing, outcome: Outcome) -> str:
    which = (
        "one network" if run.seeds == 1 else f"{run.seeds} networks, each with a seed and a held-out part of its own"
    )
    return (
        f"ResNet-18 of width {run.width}, {run.stem} stem: {which}. Probes at {len(outcome.points)} points, each the vote of "
        f"the {probing.k} nearest training pictures. A picture's depth is the first probe from which all agree with the "
        f"network: 0 where the pixels settle it, {len(outcome.points)} where even the last probe says otherwise."
    )


def embedded(figure: Figure, name: str) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _sections(findings: Findings, outcome: Outcome, images: ImageSet) -> Iterator[tuple[str, str, Figure]]:
    """Title, words and picture of each part of the page."""
    yield "The pictures", "A sample of the test pictures, class by class.", sample_sheet(images)
    yield (
        "Depth and accuracy",
        "Test pictures of all networks together, and training pictures that the network had not seen. Bars are bands of "
        "depth, dots are single depths.",
        _depth_and_accuracy(findings, outcome),
    )
    yield (
        "The probes",
        "Accuracy of the probes from the input to the last layer (thin lines: single networks).",
        _probes(findings, outcome),
    )
    easy = "Pictures that are settled first; above each its mean depth over the networks and its class."
    yield "Easiest", easy, pictures.gallery(findings, outcome, images, hardest=False)
    hard = "Pictures that are settled last; in red what the first network says where it is wrong."
    yield "Hardest", hard, pictures.gallery(findings, outcome, images, hardest=True)
    yield "Classes", "Which classes are deep; beside each its mean depth.", _classes(findings, outcome, images)
    if findings.truth:
        yield (
            "Depth and ground truth",
            "Mean depth in ten equal parts of the test pictures, with two standard errors.",
            _truth(findings, outcome, images),
        )
    if findings.agreement is not None:
        yield (
            "Consistency",
            f"Depth belongs to the picture more than to the network: over all pairs of networks the rank correlation of "
            f"their depths is {findings.agreement:+.3f} in the mean.",
            _consistency(findings, outcome),
        )


def _depth_and_accuracy(findings: Findings, outcome: Outcome) -> Figure:
    figure = new_figure(13, 4.4)
    axes = figure.subplots(1, 3 if findings.held_out else 2)
    pictures.draw_histogram(axes[0], outcome)
    pictures.draw_accuracy(axes[1], findings.test)
    if findings.held_out:
        pictures.draw_accuracy(axes[2], findings.held_out, "Training pictures, held out", pictures.SECOND)
    return figure


def _probes(findings: Findings, outcome: Outcome) -> Figure:
    figure = new_figure(8, 4)
    pictures.draw_probes(figure.subplots(), findings, outcome)
    return figure


def _classes(findings: Findings, outcome: Outcome, images: ImageSet) -> Figure:
    figure = new_figure(9, 1.8 + 0.35 * len(images.classes))
    pictures.draw_classes(figure, figure.subplots(), findings, outcome, images)
    return figure


def _truth(findings: Findings, outcome: Outcome, images: ImageSet) -> Figure:
    names = list(findings.truth)
    both = {"noise", "size"} <= set(names)
    columns = 3
    rows = -(-(len(names) + both) // columns)
    figure = new_figure(13, 3.6 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, name in zip(axes, names):
        pictures.draw_truth(axis, findings, outcome, images, name)
    if both:
        pictures.draw_map(figure, axes[len(names)], findings, outcome, images)
    for axis in axes[len(names) + both :]:
        axis.axis("off")
    return figure


def _consistency(findings: Findings, outcome: Outcome) -> Figure:
    figure = new_figure(6.2, 5)
    pictures.draw_consistency(figure, figure.subplots(), findings, outcome)
    return figure
