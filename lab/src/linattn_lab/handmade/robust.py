"""A recipe that does not depend on luck: several heads from one seed, Adam, and noise on the weights that dies away.

Attention by contents and position has local minima: a head that found half of a rule stays there. Noise on the weights
smooths the loss while the rate is high. Heads that are stuck all the same show it in their error on all sequences, which
is what is asked for, so that the best of a few can be kept.
"""

import math

import torch

from ..commandline import progress
from ..threads import one_thread
from .designs import Design
from .many import errors, head_of, padded, stack
from .torch_head import TorchHead

STARTS, STEPS, RATE, WARMUP = 8, 1500, 0.06, 50
BATCH = 32  # sequences of a step
NOISE = 0.3  # its spread on every weight, while the rate is at its highest


def learn_robust(design: Design, *, seed: int, steps: int = STEPS, starts: int = STARTS) -> TorchHead:
    """The best of `starts` heads of the design's shapes, which are trained side by side; positions are learned too."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2**31, (starts,), generator=generator).tolist()
    weights = stack([TorchHead.random(design.weights(), own).float() for own in drawn])
    tokens, expected, lengths = padded(design)
    tokens, expected = tokens.float(), expected.float()
    optimizer = torch.optim.Adam(weights.values(), lr=RATE, betas=(0.9, 0.99))
    with one_thread():
        for step in progress(range(steps), desc=f"learning {design.name}", unit="step"):
            share = schedule(step, steps)
            for group in optimizer.param_groups:
                group["lr"] = RATE * share
            rows = torch.randint(len(tokens), (BATCH,), generator=generator)
            noisy = {name: w + NOISE * share * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
            loss = errors(noisy, tokens[rows], expected[rows], lengths[rows]).mean(1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            best = int(errors(weights, tokens, expected, lengths).mean(1).argmin())
    return head_of(weights, best)


def schedule(step: int, steps: int) -> float:
    """Share of the highest rate and of the noise: a straight rise, then a cosine down to 0."""
    warmup = min(WARMUP, steps)
    rise = min(1.0, (step + 1) / warmup)
    return rise * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))) / 2
