"""A sequential network with a classifier after each stage; every example exits at the first confident one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .rules import Rule, rule_at


@dataclass(frozen=True)
class Prediction:
    """What was said of each example, and where.

    Attributes:
        classes: (n,) the class.
        exits: (n,) the exit taken; 0 is the first.
        logits: (n, classes) of that exit.
    """

    classes: Tensor
    exits: Tensor
    logits: Tensor


class EarlyExit(nn.Module):
    """Wraps any sequential backbone with any heads.

    >>> import torch
    >>> from torch import nn
    >>> from linattn_lab.early_exit import EarlyExit, Entropy
    >>> stages = [nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 16))]
    >>> model = EarlyExit(stages, [nn.Linear(16, 3), nn.Linear(16, 3)]).eval()
    >>> [logits.shape for logits in model(torch.randn(5, 8))]
    [torch.Size([5, 3]), torch.Size([5, 3])]
    >>> model.predict(torch.randn(5, 8), Entropy(10.0)).exits
    tensor([0, 0, 0, 0, 0])

    Args:
        stages: called one after another, each on what the one before returned: a tensor, or a tuple, list or dict of
            them, the batch first.
        heads: one for each stage, from what it returned to logits (n, classes). The last is the network's own.
        settings: what makes the model again, for its file.
    """

    def __init__(self, stages: Iterable[nn.Module], heads: Iterable[nn.Module], settings: dict[str, Any] | None = None):
        super().__init__()
        self.settings = settings or {}
        self.stages, self.heads = nn.ModuleList(stages), nn.ModuleList(heads)
        if len(self.stages) != len(self.heads) or not len(self.stages):
            raise ValueError(
                f"every stage needs one head, got {len(self.stages)} stages and {len(self.heads)} heads; "
                "a stage without an exit is part of the next one (nn.Sequential)."
            )

    def forward(self, x: Any) -> list[Tensor]:
        """The logits of every exit, first to last."""
        found = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            found.append(head(x))
        return found

    def full(self, x: Any) -> Tensor:
        """The last exit's logits, without computing the others: the network as it is without exits."""
        for stage in self.stages:
            x = stage(x)
        return self.heads[-1](x)

    @torch.no_grad()
    def predict(self, x: Any, rule: Rule) -> Prediction:
        """Lets every example leave by the rule; the rest of the batch goes on, without a gap.

        Only what an example needs is computed, so time falls with the exits taken.
        """
        if self.training:
            raise ValueError("predict needs a model in evaluation mode: call .eval() first.")
        left: list[tuple[int, Tensor | None, Tensor]] = []  # exit, rows of the batch (None is all), their logits
        inside: Tensor | None = None  # rows that have not left; None is all
        memory = None
        for number, (stage, head) in enumerate(zip(self.stages, self.heads, strict=True)):
            x = stage(x)
            here = rule_at(rule, number) if number + 1 < len(self.stages) else None
            if here is None and number + 1 < len(self.stages):
                continue  # a head that is left out costs nothing
            logits = head(x)
            if here is not None:
                leaves, memory = here(logits, memory)
                count = int(leaves.count_nonzero())
                if count < len(leaves):
                    if count:
                        stays = ~leaves
                        rows = torch.arange(len(leaves), device=leaves.device) if inside is None else inside
                        left.append((number, rows[leaves], logits[leaves]))
                        inside, x, memory = rows[stays], _rows(x, stays), _rows(memory, stays)
                    continue
            left.append((number, inside, logits))
            break
        return _gather(left)


def weighted_loss(logits: Sequence[Tensor], target: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted sum over exits of the cross-entropies, each summed over the examples."""
    if len(weights) != len(logits):
        raise ValueError(f"every exit needs one weight, got {len(weights)} for {len(logits)} exits.")
    losses = [weight * cross_entropy(own, target, reduction="sum") for weight, own in zip(weights, logits, strict=True)]
    return torch.stack(losses).sum()


def _rows(x: Any, keep: Tensor) -> Any:
    """The rows of a batch, whatever it is made of, that are kept."""
    if isinstance(x, Tensor):
        return x[keep]
    if isinstance(x, dict):
        return {name: _rows(part, keep) for name, part in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(_rows(part, keep) for part in x)
    return x


def _gather(left: list[tuple[int, Tensor | None, Tensor]]) -> Prediction:
    """What left at each exit, in the order in which it came in."""
    number, _, logits = left[0]
    if len(left) == 1:  # all together: nothing to put in order, and a single example should not pay for it
        classes = logits.argmax(-1)
        return Prediction(classes, torch.full_like(classes, number), logits)
    order = torch.cat([rows for _, rows, _ in left if rows is not None]).argsort()
    logits = torch.cat([own for _, _, own in left])[order]
    exits = torch.cat([torch.full((len(own),), number) for number, _, own in left]).to(order.device)[order]
    return Prediction(logits.argmax(-1), exits, logits)
