"""Tolerances of all exits chosen together, with a stated confidence that little accuracy is lost.

Half of the validation images order the candidates, the other half tests them one after another, from the most cautious to
the cheapest, and stops at the first that cannot be shown to lose less than is allowed. Testing in an order that was fixed
before keeps the chance of a wrong answer at 1 - confidence, however many candidates there are (Learn then Test;
Angelopoulos et al., 2021).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from .macs import ExitCosts
from .rules import PerExit, confidence, decide

GRID = 24  # tolerances tried at each exit, beside leaving the head out
CANDIDATES = 16  # points of the frontier that are tested


@dataclass(frozen=True)
class Choice:
    """A rule and what the validation images say of it.

    Attributes:
        loss: accuracy lost against the full network, on the half that tested it.
        bound: upper bound of that loss at the stated confidence.
        tested: how many candidates passed before.
    """

    rule: PerExit
    loss: float
    bound: float
    tested: int


def choose_together(
    logits: Tensor, labels: Tensor, costs: ExitCosts, right: Tensor, *, allowed: float = 0.01, sure: float = 0.9
) -> Choice:
    """The cheapest tolerances of which it can be said with confidence `sure` that they lose less than `allowed`.

    Args:
        logits: (exits, n, classes) of the validation images.
        right: (n,) bool, where the full network is right.
    """
    first = torch.arange(len(labels)) % 2 == 0
    candidates = frontier(logits[:, first], labels[first], costs)
    told = logits[:, ~first], labels[~first], right[~first]
    never = PerExit((None,) * (len(logits) - 1))
    best = Choice(never, *lost(never, *told, sure), 0)
    for number, rule in enumerate(candidates):
        loss, bound = lost(rule, *told, sure)
        if bound > allowed:
            break
        best = Choice(rule, loss, bound, number + 1)
    return best


def lost(rule: PerExit, logits: Tensor, labels: Tensor, right: Tensor, sure: float) -> tuple[float, float]:
    """Accuracy lost against the full network on the same images, and its upper bound (paired, one image added to be safe)."""
    exits = decide(logits, rule)
    own = logits.argmax(-1).gather(0, exits[None])[0] == labels
    worse, better, count = int((right & ~own).sum()), int((own & ~right).sum()), len(labels)
    loss = (worse - better) / count
    spread = math.sqrt(max(0.0, (worse + better + 1) / count - loss**2) / count)
    return loss, loss + NormalDist().inv_cdf(sure) * spread


def frontier(logits: Tensor, labels: Tensor, costs: ExitCosts) -> list[PerExit]:
    """Tolerances that no others beat in both accuracy and MACs, from dear to cheap, at most `CANDIDATES` of them."""
    grids, accuracy, macs = every_choice(logits, labels, costs)
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
    shape = (count + 1,) * early  # a tolerance's place t lets those leave that passed more than t; the last nobody
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
