"""Multiply-adds, in two conventions: torch's own counter, and the course's."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..images.resnet import ResNet18
from .backbones import resnet_exits
from .rules import Rule, rule_at
from .wrapper import EarlyExit

CONVENTION = (
    "MACs: multiply-adds of convolutions and matrix products, as torch.utils.flop_counter counts them (two FLOPs each); "
    "norms, activations, pools and additions are not counted; every head that an example passes is."
)
COURSE_CONVENTION = (
    "The course's MACs: multiply-adds of convolutions and linear layers, one for every output of a BatchNorm and of a "
    "pool; whole batches leave together, and a head where the batch does not leave is not counted."
)


def macs(module: nn.Module, x: Any) -> tuple[int, Any]:
    """Multiply-adds of one call, and what it returned."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = module(x)
    return counter.get_total_flops() // 2, out


@dataclass(frozen=True)
class ExitCosts:
    """MACs of one example.

    Attributes:
        exits: of leaving at each exit, with all heads on the way.
        full: of the network without exits: all stages and the last head.
        heads: of each head alone.
    """

    exits: tuple[int, ...]
    full: int
    heads: tuple[int, ...] = ()

    def under(self, rule: Rule) -> "ExitCosts":
        """The same without the heads that the rule leaves out."""
        saved, exits = 0, []
        for number, cost in enumerate(self.exits):
            if number + 1 < len(self.exits) and rule_at(rule, number) is None:
                saved += self.heads[number]
            exits.append(cost - saved)
        return replace(self, exits=tuple(exits))

    def mean(self, exits: Tensor) -> float:
        """MACs per example of those that took these exits."""
        return float(torch.tensor(self.exits, dtype=torch.float64)[exits].mean())


def exit_costs(model: EarlyExit, example: Tensor) -> ExitCosts:
    """Counts one example, (1, ...)."""
    # In float64, linear attention takes torch's products, which the counter knows, in place of the native engine's.
    model, x = copy.deepcopy(model).double().eval(), example.double()
    stages, found, each = 0, [], []
    heads = 0
    for stage, head in zip(model.stages, model.heads, strict=True):
        own, x = macs(stage, x)
        last, _ = macs(head, x)
        stages, heads = stages + own, heads + last
        found.append(stages + heads)
        each.append(last)
    return ExitCosts(tuple(found), stages + last, tuple(each))


@dataclass(frozen=True)
class CourseCosts:
    """MACs of one image in the course's convention: what each stage adds (the last with pool and classifier), and heads."""

    stages: tuple[int, ...]
    heads: tuple[int, ...]

    @property
    def full(self) -> int:
        return sum(self.stages)

    def of_batches(self, exits: Sequence[int], sizes: Sequence[int]) -> int:
        """Of batches of these sizes that left as a whole at these exits, 0 the first."""
        paid = (*self.heads, 0)  # the last head is part of the last stage
        return sum(size * (sum(self.stages[: exit + 1]) + paid[exit]) for exit, size in zip(exits, sizes, strict=True))


def course_costs(width: int = 64, side: int = 32, classes: int = 6, channels: int = 3) -> CourseCosts:
    """Counts the course's network: ResNet-18, flatten + linear after the stages 1, 2 and 3."""
    with torch.device("meta"):  # shapes are all that counting needs
        model = resnet_exits(ResNet18(classes, width=width, channels=channels), side, "linear").eval()
        x = torch.empty(1, channels, side, side)
    stages, heads = [], []
    for stage, head in zip(model.stages, model.heads, strict=True):
        own, x = _course_macs(stage, x)
        stages.append(own)
        heads.append(_course_macs(head, x)[0])
    stages[-1] += heads.pop()
    return CourseCosts(tuple(stages), tuple(heads))


def course_totals(images: int = 6000, batch: int = 128, leave: Sequence[int] = (16, 3, 6, 22)) -> tuple[int, int]:
    """The course's two figures: all images through the whole network, and with this many batches leaving at each exit."""
    costs = course_costs()
    sizes = [min(batch, images - start) for start in range(0, images, batch)]
    if sum(leave) != len(sizes):
        raise ValueError(f"{images} images are {len(sizes)} batches of {batch}, not {sum(leave)}.")
    exits = [number for number, count in enumerate(leave) for _ in range(count)]
    return images * costs.full, costs.of_batches(exits, sizes)


def _course_macs(module: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    total = 0

    def count(part: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        if isinstance(part, nn.Conv2d):
            total += out.numel() * part.weight[0].numel()
        elif isinstance(part, nn.Linear):
            total += out.numel() * part.in_features
        elif isinstance(part, (nn.BatchNorm2d, nn.AdaptiveAvgPool2d)):
            total += out.numel()

    handles = [part.register_forward_hook(count) for part in module.modules()]
    try:
        out = module(x)
    finally:
        for handle in handles:
            handle.remove()
    return total, out
