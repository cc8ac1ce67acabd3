"""The learned twin of a design, and how both are measured on every sequence."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..commandline import progress
from .designs import Design
from .numpy_head import Array, Weights, single_head, with_positions
from .torch_head import TorchHead

STEPS, RATE = 10001, 3e-2
TOLERANCE = 1e-8


def batches(design: Design) -> Iterator[tuple[list[tuple[str, ...]], Tensor, Tensor]]:
    """All sequences of one length at a time: themselves, (B, n, d_in) tokens and (B, n, d_v) expected outputs."""
    by_length: dict[int, list[tuple[str, ...]]] = {}
    for sequence in design.sequences():
        by_length.setdefault(len(sequence), []).append(sequence)
    for sequences in by_length.values():
        tokens = np.stack([design.encode(s) for s in sequences])
        expected = np.stack([design.expected(s) for s in sequences])
        yield sequences, torch.from_numpy(tokens), torch.from_numpy(expected)


def count_exact(design: Design, weights: Weights) -> tuple[int, int]:
    """How many of all sequences the NumPy head gets right to 1e-8, and how many there are."""
    right = [
        np.allclose(single_head(design.encode(s), weights).output, design.expected(s), rtol=0, atol=TOLERANCE)
        for s in design.sequences()
    ]
    return sum(right), len(right)


def mean_squared_error(design: Design, head: TorchHead) -> float:
    """The mean over all sequences of each one's mean squared error."""
    with torch.no_grad():
        errors = [(head(tokens) - expected).square().mean((1, 2)) for _, tokens, expected in batches(design)]
    return float(torch.cat(errors).mean())


def learn(design: Design, *, seed: int, steps: int = STEPS, rate: float = RATE) -> TorchHead:
    """A head of the design's shapes, trained by plain SGD on one random sequence a step. Positions are learned too."""
    weights = TorchHead.random(design.weights(), seed).weights()
    examples = [(x, y) for _, *both in batches(design) for x, y in zip(*(part.numpy() for part in both), strict=True)]
    order = torch.randint(len(examples), (steps,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    for index in progress(order, desc=f"learning {design.name}", unit="step"):
        tokens, expected = examples[index]
        for weight, gradient in gradients(tokens, expected, weights):
            weight -= rate * gradient
    return TorchHead.of(weights)


def gradients(tokens: Array, expected: Array, weights: Weights) -> list[tuple[Array, Array]]:
    """What one sequence is about: parts of the weights, each with the gradient of the mean squared error.

    By hand, in NumPy: a sequence has a handful of numbers, and autograd takes several times as long to keep books on them.
    """
    n, width = tokens.shape
    x = with_positions(tokens, weights)
    Q, K, V = x @ weights.Qm, x @ weights.Km, x @ weights.Vm
    scale = 1 / math.sqrt(Q.shape[1])
    scores = Q @ K.T * scale
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    d_output = (shares @ V - expected) * (2 / expected.size)
    d_shares = d_output @ V.T
    d_scores = shares * (d_shares - (shares * d_shares).sum(1, keepdims=True)) * scale
    d_Q, d_K, d_V = d_scores @ K, d_scores.T @ Q, shares.T @ d_output
    found = [(weights.Km, x.T @ d_K), (weights.Qm, x.T @ d_Q), (weights.Vm, x.T @ d_V)]
    if weights.max_len is not None:
        d_x = d_Q @ weights.Qm.T + d_K @ weights.Km.T + d_V @ weights.Vm.T
        if weights.pos is not None:
            end = width + weights.pos.shape[1]
            found.append((weights.pos[:n], d_x[:, width:end]))
            width = end
        if weights.pos_end is not None:
            found.append((weights.pos_end[:n], d_x[::-1, width:]))
    return found
