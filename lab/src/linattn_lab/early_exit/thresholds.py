"""Tolerances of all exits chosen together, with a stated confidence that little accuracy is lost.

Training images order the candidates. The validation images test them one after another, from the most cautious to the
cheapest, and stop at the first that cannot be shown to lose less than is allowed. Testing in an order that was fixed before
keeps the chance of a wrong answer at 1 - confidence, however many candidates there are (Learn then Test; Angelopoulos et
al., 2021), and nothing is assumed of the images that give the order.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from ..images.datasets import Part
from .macs import ExitCosts
from .rules import PerExit, confidence, decide
from .sweep import all_logits
from .wrapper import EarlyExit

GRID = 24  # tolerances tried at each exit, beside leaving the head out
CANDIDATES = 16  # points of the frontier that are tested
ORDERING = 6000  # training images that order them, the last ones: the first ones taught the first head
SURE = 0.99


@dataclass(frozen=True)
class Choice:
    """A rule and what the validation images say of it.

    Attributes:
        loss: accuracy lost against the last exit, on the images that tested it.
        bound: upper bound of that loss at the stated confidence.
        tested: how many candidates passed before.
    """

    rule: PerExit
    loss: float
    bound: float
    tested: int


class Known(NamedTuple):
    """Images of which the answers are known: logits (exits, n, classes) of all exits, and labels (n,)."""

    logits: Tensor
    labels: Tensor


def known(model: EarlyExit, part: Part, last: int | None = None) -> Known:
    """What a network says of images, or of the last so many."""
    images, labels = (part.images, part.labels) if last is None else (part.images[-last:], part.labels[-last:])
    return Known(all_logits(model, images), labels)


def choose_together(
    ordering: Known, testing: Known, costs: ExitCosts, *, allowed: float = 0.01, sure: float = SURE
) -> Choice:
    """The cheapest tolerances of which it can be said with confidence `sure` that they lose less than `allowed`.

    Args:
        ordering: images by which candidates are ordered.
        testing: other images, which the network was not trained on.
        allowed: accuracy that may be lost against the last exit.
    """
    never = PerExit((None,) * (len(testing.logits) - 1))
    best = Choice(never, *lost(never, testing, sure), 0)
    for number, rule in enumerate(frontier(ordering, costs)):
        loss, bound = lost(rule, testing, sure)
        if bound > allowed:
            break
        best = Choice(rule, loss, bound, number + 1)
    return best


def lost(rule: PerExit, images: Known, sure: float) -> tuple[float, float]:
    """Accuracy lost against the last exit on the same images, and its upper bound (paired, one image added to be safe)."""
    right = images.logits.argmax(-1) == images.labels  # (exits, n)
    own = right.gather(0, decide(images.logits, rule)[None])[0]
    worse, better, count = int((right[-1] & ~own).sum()), int((own & ~right[-1]).sum()), len(images.labels)
    loss = (worse - better) / count
    spread = math.sqrt(max(0.0, (worse + better + 1) / count - loss**2) / count)
    return loss, loss + NormalDist().inv_cdf(sure) * spread


def frontier(images: Known, costs: ExitCosts) -> list[PerExit]:
    """Tolerances that no others beat in both accuracy and MACs, from dear to cheap, at most `CANDIDATES` of them."""
    grids, accuracy, macs = every_choice(*images, costs)
    order = macs.flatten().argsort()
    flat, best = accuracy.flatten(), -1.0
    kept: list[int] = []
    for place in order.tolist():
        if float(flat[place]) > best:
            best = float(flat[place])
            kept.append(place)
    aims = torch.linspace(
        math.log(float(macs.flatten()[kept[0]])), math.log(float(macs.flatten()[kept[-1]])), CANDIDATES
    )
    spread = [min(kept, key=lambda place: abs(math.log(float(macs.flatten()[place])) - aim)) for aim in aims.tolist()]
    found = []
    for place in dict.fromkeys(reversed(spread)):
        numbers = torch.unravel_index(torch.tensor(place), macs.shape)
        found.append(PerExit(tuple(grid[int(number)] for grid, number in zip(grids, numbers, strict=True))))
    return found


def every_choice(
    logits: Tensor, labels: Tensor, costs: ExitCosts, count: int = GRID
) -> tuple[list[list[float | None]], Tensor, Tensor]:
    """Accuracy and mean MACs of all combinations of tolerances, one dimension for each early exit.

    Images are counted once in a table of the tolerances that they pass at each exit; who is left after some exits is then a
    sum over a corner of the table, so that every combination costs a few additions however many images there are.

    Returns:
        The tolerances of each exit (the last of them None, the head left out), accuracies, and MACs.
    """
    early = len(logits) - 1
    sure = torch.stack([confidence(own) for own in logits[:-1]])  # (early, n)
    at = torch.linspace(0, 1, count)
    levels = [torch.cat([torch.tensor([0.0]), own.quantile(at)[1:-1], torch.tensor([1.0])]) for own in sure]
    passed = torch.stack([torch.searchsorted(level, own) for level, own in zip(levels, sure, strict=True)])
    shape = (count + 1,) * early  # a tolerance's place t lets those leave that passed more than t; the last, none
    cells = torch.zeros(len(labels), dtype=torch.long)
    for own in passed:
        cells = cells * (count + 1) + own
    total = torch.zeros(shape, dtype=torch.float64)
    accuracy, macs = total.clone(), total.clone()
    stay = _inside(cells, torch.ones(len(labels)), shape)
    for number in range(early + 1):
        right = _inside(cells, (logits[number].argmax(-1) == labels).double(), shape)
        before = _corner(right, number)
        leave = before - (_corner(right, number + 1) if number < early else 0)
        accuracy += leave
        count_left = _corner(stay, number) - (_corner(stay, number + 1) if number < early else 0)
        cost = torch.full(shape, float(costs.exits[number]), dtype=torch.float64)
        for head in range(min(number, early)):
            place = [slice(None)] * early
            place[head] = count  # type: ignore[call-overload]
            cost[tuple(place)] -= costs.heads[head]
        macs += count_left * cost
    grids: list[list[float | None]] = [[*level.tolist(), None] for level in levels]
    return grids, accuracy / len(labels), macs / len(labels)


def _inside(cells: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """For each combination of tolerances, the sum of the weights of the images that leave at no exit."""
    table = torch.bincount(cells, weight.double(), math.prod(shape)).reshape(shape)
    for dimension in range(len(shape)):
        table = table.cumsum(dimension)
    return table


def _corner(table: Tensor, exits: int) -> Tensor:
    """The same of those that leave at none of the first exits, whatever the later tolerances are."""
    for dimension in range(exits, table.dim()):
        last = table.shape[dimension] - 1
        table = table.narrow(dimension, last, 1)
    return table
