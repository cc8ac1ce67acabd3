"""The report as one page."""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure

from linattn import pages

from ..images import ImageSet
from ..images.figures import sample_sheet
from ..plotting import new_figure
from . import plots
from .runs import Outcome, Probing, Run
from .statistics import Findings

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_page(
    path: Path, findings: Findings, outcome: Outcome, images: ImageSet, text: str, rows: list[list[str]]
) -> None:
    """Writes the page: the introduction `text`, the table of figures (heading first), and a section for each plot."""
    sections = [
        {"title": title, "text": about, "plot": pages.plot_address(figure)}
        for title, about, figure in _sections(findings, outcome, images)
    ]
    title = f"Prediction depth: {images.name}"
    pages.write_page(path, TEMPLATE, title=title, introduction=text, rows=rows, sections=sections)


def introduction(run: Run, probing: Probing, outcome: Outcome) -> str:
    which = (
        "one network" if run.seeds == 1 else f"{run.seeds} networks, each with a seed and a held-out part of its own"
    )
    return (
        f"ResNet-18 of width {run.width}, {run.stem} stem: {which}. Probes at {len(outcome.points)} points, each the vote of "
        f"the {probing.k} nearest training images. A picture's depth is the first probe from which all agree with the "
        f"network: 0 where the pixels settle it, {len(outcome.points)} where even the last probe says otherwise."
    )


def _sections(findings: Findings, outcome: Outcome, images: ImageSet) -> Iterator[tuple[str, str, Figure]]:
    """Title, words and image of each part of the page."""
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
    yield "Easiest", easy, plots.gallery(findings, outcome, images, hardest=False)
    hard = "Pictures that are settled last; in red what the first network says where it is wrong."
    yield "Hardest", hard, plots.gallery(findings, outcome, images, hardest=True)
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
    plots.draw_histogram(axes[0], outcome)
    plots.draw_accuracy(axes[1], findings.test)
    if findings.held_out:
        plots.draw_accuracy(axes[2], findings.held_out, "Training pictures, held out", plots.SECOND)
    return figure


def _probes(findings: Findings, outcome: Outcome) -> Figure:
    figure = new_figure(8, 4)
    plots.draw_probes(figure.subplots(), findings, outcome)
    return figure


def _classes(findings: Findings, outcome: Outcome, images: ImageSet) -> Figure:
    figure = new_figure(9, 1.8 + 0.35 * len(images.classes))
    plots.draw_classes(figure, figure.subplots(), findings, outcome, images)
    return figure


def _truth(findings: Findings, outcome: Outcome, images: ImageSet) -> Figure:
    names = list(findings.truth)
    both = {"noise", "size"} <= set(names)
    columns = 3
    rows = -(-(len(names) + both) // columns)
    figure = new_figure(13, 3.6 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, name in zip(axes, names, strict=False):
        plots.draw_truth(axis, findings, outcome, images, name)
    if both:
        plots.draw_map(figure, axes[len(names)], findings, outcome, images)
    for axis in axes[len(names) + both :]:
        axis.axis("off")
    return figure


def _consistency(findings: Findings, outcome: Outcome) -> Figure:
    figure = new_figure(6.2, 5)
    plots.draw_consistency(figure, figure.subplots(), findings, outcome)
    return figure
