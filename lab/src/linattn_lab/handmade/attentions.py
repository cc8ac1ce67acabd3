"""The hand-set weights under softmax, argmax and every kernel of the library: where each fails, and why."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linattn import attention, implied_attention, kernels

from ..questions.argmax import argmax_weights
from ..threads import one_thread
from .designs import Design
from .torch_head import TorchHead
from .training import TOLERANCE, batches

Pair = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # query, key, value -> weights, output


@dataclass(frozen=True)
class Outcome:
    """What one kind of attention made of a design on all of its sequences.

    Attributes:
        exact, of: sequences right to 1e-8, of how many.
        worst: the largest error of any output.
        leak: mean weight on keys that the selector did not choose.
        ratio: median over rows of a chosen key's weight over that of one not chosen; None if none has any.
        uneven: mean over rows of the largest departure from equal shares among the chosen keys.
        negative: share of rows with a negative weight.
        empty: share of rows in which no key has any weight.
        breaks_at: the first sequence that came out wrong.
    """

    exact: int
    of: int
    worst: float
    leak: float
    ratio: float | None
    uneven: float
    negative: float
    empty: float
    breaks_at: str | None

    def why(self) -> str:
        """The reason in words, by these numbers."""
        if self.exact == self.of:
            return "exact: only chosen keys get weight, and equal shares of it"
        reasons = []
        if self.empty > 0:
            reasons.append(f"{self.empty:.0%} of rows share no feature with any key and come out as 0")
        if self.negative > 0:
            reasons.append(f"{self.negative:.0%} of rows have negative weights")
        if abs(self.leak) > TOLERANCE:
            ratio = "" if self.ratio is None else f": a chosen key has {self.ratio:.3g} times the weight of another"
            reasons.append(f"{self.leak:.3g} of the weight goes to keys not chosen{ratio}")
        if self.uneven > max(1e-6, 0.1 * abs(self.leak)) and not self.negative:
            reasons.append(f"chosen keys should share equally and are uneven by {self.uneven:.2g}")
        return "; ".join(reasons)


def attentions(dim: int) -> dict[str, Pair]:
    """By name, for queries of this dim; all see the same scores q.k / sqrt(dim)."""
    scale = 1 / math.sqrt(dim)
    names = ("softmax", "positive", "trig", "polynomial", "taylor", "elu", "relu")
    made: dict[str, kernels.Kernel] = {name: kernels.NAMES[name](dim) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # trig-plain warns that it is for study, which this is
        made["trig-plain"] = kernels.Trig(dim, normalize=False)
    made["learned, untrained"] = kernels.Learned(dim)

    def with_kernel(kernel: kernels.Kernel) -> Pair:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            matrix = implied_attention(query, key, kernel, scale=scale)
            return matrix, attention(query, key, value, kernel=kernel, scale=scale)

        return attend

    def hard(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        matrix = argmax_weights(query, key)
        return matrix, matrix @ value

    softmax = made.pop("softmax")
    return {"softmax": with_kernel(softmax), "argmax": hard, **{name: with_kernel(k) for name, k in made.items()}}


def try_attention(design: Design, attend: Pair) -> Outcome:
    """Runs the design's hand weights on all its sequences."""
    head = TorchHead.of(design.weights())
    right, worst, first_wrong = 0, 0.0, None
    leaks, ratios, uneven, negative, empty = [], [], [], [], []
    total = 0
    for sequences, tokens, expected in batches(design):
        with torch.no_grad(), one_thread():
            query, key, value = (x.unsqueeze(1) for x in head.project(tokens))  # (B, 1, n, d)
            weights, output = (x.squeeze(1) for x in attend(query, key, value))
        chosen = torch.from_numpy(np.stack([design.selector.selected(s) for s in sequences]))  # (B, n, n)
        error = (output - expected).abs().amax((1, 2))
        right += int((error <= TOLERANCE).sum())
        worst = max(worst, float(error.max()))
        total += len(sequences)
        wrong = (error > TOLERANCE).nonzero()
        if first_wrong is None and len(wrong):
            first_wrong = "".join(sequences[int(wrong[0])])
        others = ~chosen
        leaks.append((weights * others).sum(-1).flatten())
        share = (weights * chosen).sum(-1, keepdim=True) / chosen.sum(-1, keepdim=True)
        uneven.append(((weights - share).abs() * chosen).amax(-1).flatten())
        some = others.any(-1)
        rest = (weights * others).sum(-1)[some] / others.sum(-1)[some]
        ratios.append((share.squeeze(-1)[some] / rest)[rest > 0])
        negative.append((weights < 0).any(-1).flatten())
        empty.append((weights == 0).all(-1).flatten())

    def mean(parts: list[Tensor]) -> float:
        return float(torch.cat(parts).double().mean())

    all_ratios = torch.cat(ratios)
    ratio = float(all_ratios.median()) if len(all_ratios) else None
    return Outcome(right, total, worst, mean(leaks), ratio, mean(uneven), mean(negative), mean(empty), first_wrong)
