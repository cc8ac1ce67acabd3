"""Everything that the report shows: measured once, drawn elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..images.sets import Part
from ..images.training import scores
from .latency import latencies
from .macs import ExitCosts, course_totals, exit_costs, macs
from .rules import RULES, decide, name_of
from .sweep import Point, all_logits, choose, point, sweep
from .wrapper import EarlyExit

TIMED = {1: 256, 128: 1024}  # size of a batch -> pictures that are timed
POINTS = 5  # tolerances of each rule that are timed


@dataclass(frozen=True)
class Static:
    """A network without exits."""

    width: int
    accuracy: float
    macs: int
    seconds: dict[int, float]


@dataclass
class Curve:
    """One network with exits on the test pictures.

    Attributes:
        logits: (exits, n, classes).
        points: the whole sweep.
        chosen: the point whose tolerance was chosen on the validation pictures.
        seconds: (rule, tolerance) and size of batch -> seconds per picture, of those that were timed.
    """

    logits: Tensor
    costs: ExitCosts
    points: list[Point]
    chosen: Point
    exits: Tensor
    seconds: dict[tuple[str, float], dict[int, float]] = field(default_factory=dict)

    def exit_accuracies(self, labels: Tensor) -> list[tuple[float, float | None]]:
        """For each exit: accuracy over all pictures, and over those that leave there (None where nobody does)."""
        found = []
        for number, own in enumerate(self.logits):
            right, here = own.argmax(-1) == labels, self.exits == number
            found.append((float(right.double().mean()), float(right[here].double().mean()) if here.any() else None))
        return found
