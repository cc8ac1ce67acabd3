"""Plots of answers, and one page of all of them."""

from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from linattn import pages

from ..plotting import new_figure, save_figure
from .answer import Answer, say

TEMPLATE = Path(__file__).with_name("page.html.j2")


def make_figure(answer: Answer) -> Figure:
    figure = new_figure(11, 4.2)
    answer.draw(figure)
    figure.suptitle(answer.question, fontweight="bold")
    return figure


def save_picture(answer: Answer, path: Path) -> None:
    save_figure(make_figure(answer), path)


def write_page(answers: Iterable[Answer], path: Path) -> None:
    """A page of all answers: text, plot, and theory next to measurement."""
    shown = [
        {
            "question": answer.question,
            "text": answer.text,
            "plot": pages.plot_address(make_figure(answer)),
            "findings": [(f.statement, say(f.predicted), say(f.measured), f.agrees) for f in answer.findings],
        }
        for answer in answers
    ]
    pages.write_page(path, TEMPLATE, title="Questions about attention", answers=shown)
