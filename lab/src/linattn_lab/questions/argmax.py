"""Argmax attention: what it gives, why it cannot be trained, and softmax's way towards it."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linattn import attention

from .answer import Answer, Finding, exponent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUERY = [[1.0, 1.0, 2.0]]
KEYS = [[1.0, 2.0, 0.0], [0.0, 3.0, 4.0], [5.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
VALUES = [[2.0, 0.0, 1.0], [1.0, 4.0, 3.0], [0.0, -1.0, 4.0], [1.0, 0.0, -1.0]]
GAP = 6.0  # the best score, 11, less the second, 5
STEP = 1e-4


def argmax_weights(query: Tensor, key: Tensor) -> Tensor:
    """(..., L, D), (..., S, D) -> (..., L, S): 1 for the key of the highest score, the first of several equal ones."""
    scores = query @ key.mT
    return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)


def argmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The value of the best key: (..., L, D), (..., S, D), (..., S, M) -> (..., L, M)."""
    return argmax_weights(query, key) @ value


def ask(seed: int = 0, quick: bool = False) -> Answer:
    """The worked example, its gradients, and softmax at falling temperatures. Nothing in it is random or slow."""
    query, key, value = (torch.tensor(x, dtype=torch.float64) for x in (QUERY, KEYS, VALUES))
    output = argmax_attention(query, key, value)

    def softmax_at(temperature: float, query: Tensor = query, key: Tensor = key) -> Tensor:
        return attention(query, key, value, kernel="softmax", scale=1 / temperature)

    temperatures = [0.25 * 2 ** (i / 4) for i in range(25)]  # 0.25 to 16
    errors = [float((softmax_at(t) - output).abs().max()) for t in temperatures]
    slopes = [_steepest(lambda q, k, t=t: softmax_at(t, q, k), query, key) for t in temperatures]
    cold = [i for i, t in enumerate(temperatures) if t <= 0.5]
    inverse = [1 / temperatures[i] for i in cold]
    decay = exponent([math.exp(x) for x in inverse], [errors[i] for i in cold])
    hard_slope = _steepest(lambda q, k: argmax_attention(q, k, value), query, key)
    findings = [
        Finding("scores", "scores of the worked example", [3.0, 11.0, 5.0, 2.0], (query @ key.mT)[0].tolist(), 0),
        Finding("output", "output of the worked example", [1.0, 4.0, 3.0], output[0].tolist(), 0),
        Finding("gradient", "steepest gradient to any entry of q and k", 0.0, hard_slope, 0),
        Finding("limit", "softmax(scores / T) v against argmax, T = 0.25", 0.0, errors[0], 1e-9),
        Finding("decay", "log error of softmax against 1 / T: minus the gap of the scores", -GAP, decay, 0.01),
    ]

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2)
        gap_line = [5 * math.exp(-GAP / t) for t in temperatures]  # 5 is the largest difference of the best two values
        left.semilogy([1 / t for t in temperatures], errors, "o", color="C0", label="measured")
        left.semilogy([1 / t for t in temperatures], gap_line, "-", color="C1", label="theory: 5 exp(-6 / T)")
        left.set(xlabel="1 / temperature", ylabel="largest error against argmax", title="Softmax turns into argmax")
        right.loglog(temperatures, [max(s, 1e-12) for s in slopes], "o-", color="C0", label="softmax at T")
        right.axhline(1e-12, color="C3", label="argmax: 0 (drawn at the bottom)")
        right.set(xlabel="temperature", ylabel="steepest gradient to q and k", title=".. and its gradients vanish")
        for axis in (left, right):
            axis.legend()
            axis.grid(alpha=0.3)

    text = (
        "Argmax attention returns the value of the best key. A small change of q or k changes no winner, so gradients "
        "are zero almost everywhere and nothing can be learned through it. Softmax of scores / T comes as close as "
        "exp(-gap / T), and loses its gradients on the way."
    )
    return Answer("argmax", "What is attention that takes only the best key?", text, findings, draw)


def _steepest(function: Callable[..., Tensor], query: Tensor, key: Tensor) -> float:
    """The largest central difference of any output by any entry of q and k."""
    steepest = 0.0
    for which, x in enumerate((query, key)):
        for index in range(x.numel()):
            shift = torch.zeros_like(x).flatten()
            shift[index] = STEP
            sides = []
            for sign in (1, -1):
                moved = [query, key]
                moved[which] = x + sign * shift.view_as(x)
                sides.append(function(*moved))
            steepest = max(steepest, float((sides[0] - sides[1]).abs().max()) / (2 * STEP))
    return steepest
