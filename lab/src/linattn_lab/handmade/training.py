"""The learned twin of a design, and how both are measured on every sequence."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..commandline import progress
from ..threads import one_thread
from .designs import Design
from .numpy_head import Weights, single_head
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
    head = TorchHead.random(design.weights(), seed)
    examples = [(x, y) for _, tokens, expected in batches(design) for x, y in zip(tokens, expected, strict=True)]
    order = torch.randint(len(examples), (steps,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    parameters = list(head.parameters())
    with one_thread():
        for index in progress(order, desc=f"learning {design.name}", unit="step"):
            tokens, expected = examples[index]
            loss = (head(tokens) - expected).square().mean()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=rate)
    return head
