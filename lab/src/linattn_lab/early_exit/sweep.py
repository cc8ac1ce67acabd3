"""Accuracy and MACs over tolerances, and the tolerance that a floor or a budget asks for."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .macs import ExitCosts
from .rules import RULES, Rule, decide, make_rule, name_of
from .wrapper import EarlyExit


@dataclass(frozen=True)
class Point:
    """One rule at one tolerance on some examples.

    Attributes:
        accuracy: share of examples whose class was right at the exit they took.
        macs: mean multiply-adds of an example.
        shares: of the examples that took each exit.
    """

    rule: Rule
    accuracy: float
    macs: float
    shares: tuple[float, ...]

    def figures(self) -> dict[str, Any]:
        """For machines."""
        return {
            "rule": name_of(self.rule),
            "tolerance": self.rule.tolerance,
            "accuracy": self.accuracy,
            "macs": self.macs,
            "exit_shares": list(self.shares),
        }


@torch.no_grad()
def all_logits(model: EarlyExit, images: Tensor, batch: int = 250) -> Tensor:
    """Logits of every exit for every image, (exits, n, classes), on the CPU."""
    model.eval()
    device = next(model.parameters()).device
    parts = [torch.stack(model(part.to(device))).cpu() for part in images.split(batch)]
    return torch.cat(parts, 1)


def grid(name: str, classes: int, exits: int, count: int = 60) -> list[Rule]:
    """Tolerances of a rule, from leaving late to leaving at once."""
    if name == "patience":
        return [make_rule(name, number) for number in range(exits, 0, -1)]
    if name == "entropy":
        top = math.log(classes) * 1.01  # above the largest entropy there is
        return [make_rule(name, float(f"{x:.3g}")) for x in torch.logspace(-3, math.log10(top), count).tolist()]
    return [
        make_rule(name, 1 - float(f"{x:.3g}"))
        for x in torch.logspace(-4, math.log10(1 - 0.9 / classes), count).tolist()
    ]


def point(logits: Tensor, labels: Tensor, costs: ExitCosts, rule: Rule) -> Point:
    """What a rule gives, from the logits of all exits."""
    exits = decide(logits, rule)
    classes = logits.argmax(-1).gather(0, exits[None])[0]
    shares = torch.bincount(exits, minlength=len(logits)).double() / len(exits)
    return Point(
        rule, float((classes == labels).double().mean()), costs.under(rule).mean(exits), tuple(shares.tolist())
    )


def sweep(logits: Tensor, labels: Tensor, costs: ExitCosts, rules: Iterable[str] = tuple(RULES)) -> list[Point]:
    """All rules over their grids."""
    exits, _, classes = logits.shape
    return [point(logits, labels, costs, rule) for name in rules for rule in grid(name, classes, exits)]


def choose(points: Iterable[Point], *, floor: float | None = None, budget: float | None = None) -> Point:
    """The cheapest point with at least the accuracy `floor`, or the most accurate with at most `budget` MACs an example."""
    points = list(points)
    if (floor is None) == (budget is None):
        raise ValueError("choose by an accuracy floor or by a budget of MACs, one of the two.")
    if floor is not None:
        able = [p for p in points if p.accuracy >= floor]
        if not able:
            best = max(p.accuracy for p in points)
            raise ValueError(f"no tolerance reaches an accuracy of {floor:.4f}; the best reaches {best:.4f}.")
        return min(able, key=lambda p: (p.macs, -p.accuracy))
    able = [p for p in points if p.macs <= float(budget or 0)]
    if not able:
        least = min(p.macs for p in points)
        raise ValueError(f"no tolerance stays within {budget:.4g} MACs; the first exit alone takes {least:.4g}.")
    return max(able, key=lambda p: (p.accuracy, -p.macs))
