"""Causal sums: a state of constant size does what an N x N mask does, in linear time."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linattn import State, attention, implied_attention
from linattn.kernels import KernelName

from .answer import Answer, Finding, exponent, race

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIM = 64
STEPS = 20  # in one measurement, since one alone is too short to time


def ask(seed: int = 0, quick: bool = False) -> Answer:
    """Compares token by token, in one call and masked; then takes times while N grows."""
    generator = torch.Generator().manual_seed(seed)
    same = {kernel: _difference(kernel, generator) for kernel in ("elu", "positive", "polynomial")}
    linear = [1024, 2048, 4096] if quick else [2048, 4096, 8192, 16384]
    square = [512, 1024, 2048]
    sums = [_sums(*_tokens(n, DIM, generator)) for n in linear]
    state_bytes = [work()[1].nbytes for work in sums]
    linear_times = race(sums, 9 if quick else 20)
    square_times = race([_masked(*_tokens(n, DIM, generator)) for n in square], 5 if quick else 15)
    steps = _step_times([n // 8 for n in linear], generator)
    findings = [
        *(
            Finding(f"recursion_{kernel}", f"state recursion against masking, {kernel}", 0.0, difference, 1e-9)
            for kernel, difference in same.items()
        ),
        Finding(
            "state",
            f"state after {linear[-1]} tokens over that after {linear[0]}",
            1.0,
            state_bytes[-1] / state_bytes[0],
            0,
        ),
        Finding("exponent_sums", "growth of time with N, causal sums", 1.0, exponent(linear, linear_times), 0.25),
        Finding("exponent_mask", "growth of time with N, masked N x N", 2.0, exponent(square, square_times), 0.25),
        Finding(
            "step",
            f"time of one more token after {linear[-1] // 8} over after {linear[0] // 8}",
            1.0,
            steps[-1] / steps[0],
            0.5,
        ),
    ]

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2)
        for sizes, times, power, color, name in (
            (square, square_times, 2, "C3", "masked N x N"),
            (linear, linear_times, 1, "C0", "causal sums"),
        ):
            left.loglog(sizes, [t * 1e3 for t in times], "o", color=color, label=f"{name}, measured")
            line = [times[-1] * (n / sizes[-1]) ** power * 1e3 for n in sizes]
            left.loglog(sizes, line, "-", color=color, label=f"{name}, theory: N^{power}", alpha=0.6)
        left.set(xlabel="tokens N", ylabel="milliseconds", title="All outputs of a sequence")
        right.semilogx([n // 8 for n in linear], [t * 1e6 for t in steps], "o", color="C0", label="measured")
        right.axhline(steps[0] * 1e6, color="C1", ls="--", label="theory: constant")
        right.set(xlabel="tokens seen before", ylabel="microseconds", title="One more token")
        right.set_xticks([n // 8 for n in linear], [str(n // 8) for n in linear])
        right.xaxis.minorticks_off()
        right.set_ylim(0, 2 * max(steps) * 1e6)
        left.set_ylim(top=20 * left.get_ylim()[1])
        for axis in (left, right):
            axis.legend(loc="upper left")
            axis.grid(alpha=0.3)

    text = (
        "S_i = S_{i-1} + phi(k_i) v_i and Z_i = Z_{i-1} + phi(k_i) hold all that output i needs, so token by token, in "
        "one call or by masking an N x N matrix come to the same numbers. The sums take time N where the mask takes "
        "N^2, and the next token costs the same however many came before."
    )
    return Answer("causal", "Can a causal sum do without a mask?", text, findings, draw)


def _tokens(n: int, dim: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, 1, n, dim, generator=generator, dtype=dtype) for _ in range(3)]


def _difference(kernel: KernelName, generator: torch.Generator) -> float:
    """The largest difference between one token at a time, one call, and the masked matrix, in float64."""
    q, k, v = _tokens(48, 8, generator, torch.float64)
    masked = implied_attention(q, k, kernel, is_causal=True) @ v
    whole = attention(q, k, v, kernel=kernel, is_causal=True)
    state, rows = None, []
    for i in range(48):
        token = slice(i, i + 1)
        row, state = attention(
            q[:, :, token],
            k[:, :, token],
            v[:, :, token],
            None,
            0.0,
            True,
            kernel=kernel,
            state=state,
            return_state=True,
        )
        rows.append(row)
    return max(float((x - masked).abs().max()) for x in (whole, torch.cat(rows, 2)))


def _sums(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, State]]:
    return lambda: attention(q, k, v, kernel="elu", is_causal=True, return_state=True)


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    return lambda: implied_attention(q, k, "elu", is_causal=True) @ v


def _step_times(counts: list[int], generator: torch.Generator) -> list[float]:
    """Time of one token given the state after each count of tokens."""
    q, k, v = _tokens(1, DIM, generator)
    states = [_sums(*_tokens(n, DIM, generator))()[1] for n in counts]

    def step(state: State) -> None:
        for _ in range(STEPS):
            attention(q, k, v, kernel="elu", is_causal=True, state=state, return_state=True)

    times = race([functools.partial(step, state) for state in states], 10)
    return [t / STEPS for t in times]
