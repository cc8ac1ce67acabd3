"""The result of an experiment: predictions next to measurements, and a plot."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..threads import one_thread

Number = float | list[float]


@dataclass(frozen=True)
class Finding:
    """One statement of the theory and what was measured.

    Attributes:
        key: its name as JSON.
        statement: what is compared, in words.
        tolerance: how far the two may lie apart and still agree, relative to the prediction (absolute where that is 0).
    """

    key: str
    statement: str
    predicted: Number
    measured: Number
    tolerance: float

    @property
    def agrees(self) -> bool:
        predicted, measured = np.atleast_1d(self.predicted), np.atleast_1d(self.measured)
        room = self.tolerance * np.where(predicted == 0, 1.0, np.abs(predicted))
        return bool((np.abs(predicted - measured) <= room).all())


@dataclass(frozen=True)
class Answer:
    """A question, its findings, and how to draw them on a matplotlib figure."""

    name: str
    question: str
    text: str
    findings: list[Finding]
    draw: Callable[[Any], None]

    def figures(self) -> dict[str, dict[str, Any]]:
        return {f.key: {"predicted": f.predicted, "measured": f.measured, "agrees": f.agrees} for f in self.findings}


def say(number: Number) -> str:
    """A number or a short list of them, for people."""
    if isinstance(number, list):
        return "[" + ", ".join(f"{x:g}" for x in number) + "]"
    return f"{number:.4g}"


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost against log size: 1 for linear, 2 for quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def race(works: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Seconds of each work: the shortest of several rounds, in which they take turns on one thread.

    Turns, so that whatever else the machine does for a while slows all of them; the shortest, so that it counts least.
    """
    best = [math.inf] * len(works)
    with one_thread():
        for work in works:
            work()
        for _ in range(rounds):
            for i, work in enumerate(works):
                start = time.perf_counter()
                work()
                best[i] = min(best[i], time.perf_counter() - start)
    return best
