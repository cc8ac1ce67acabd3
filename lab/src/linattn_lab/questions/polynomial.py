"""The polynomial kernel (q.k + 1)^2: exact features, and a cost of N D^2 M."""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linattn import attention, kernels

from .answer import Answer, Finding, exponent, race

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sizes = dict[str, list[int]]
Series = dict[str, list[float]]


def ask(seed: int = 0, quick: bool = False) -> Answer:
    """Checks the features against the kernel, counts FLOPs, and takes times while N, D and M grow."""
    generator = torch.Generator().manual_seed(seed)
    exactness = _exactness(generator)
    base = {"N": 512, "D": 32, "M": 256} if quick else {"N": 2048, "D": 32, "M": 256}
    grid = {
        "N": [base["N"] * f for f in (1, 2, 4)],
        "D": [16, 32, 64],
        "M": [base["M"] * f for f in (1, 2, 4)],
    }
    flops: Series = {}
    times: Series = {}
    theory: Series = {}
    for name, sizes in grid.items():
        shapes = [{**base, name: size} for size in sizes]
        calls = [_call(**shape, generator=generator) for shape in shapes]
        flops[name] = [_count(call) for call in calls]
        times[name] = race([_sums_alone(**shape, generator=generator) for shape in shapes], 5 if quick else 9)
        theory[name] = [_formula(**shape) for shape in shapes]
    findings = [
        *exactness,
        Finding("flops", "FLOPs counted by torch against 4 N r M", theory["N"][-1], flops["N"][-1], 0.15),
    ]
    for name, sizes in grid.items():
        predicted = exponent(sizes, theory[name])
        findings.append(
            Finding(f"flops_in_{name}", f"growth of FLOPs with {name}", predicted, exponent(sizes, flops[name]), 0.05)
        )
    for name, sizes in grid.items():
        predicted = exponent(sizes, theory[name])
        findings.append(
            Finding(
                f"time_in_{name}",
                f"growth of the sums' time with {name}",
                predicted,
                exponent(sizes, times[name]),
                0.25,
            )
        )

    text = (
        "Every product of two coordinates, once and rightly weighted, makes (q.k + 1)^2 exactly; forgetting the cross "
        "terms does not. r is about D^2 / 2, so all outputs cost 4 N r M = 2 N D^2 M: linear in N, quadratic in D. "
        "Times are of these sums; making the features takes N r multiplications besides."
    )
    draw = partial(_draw, base=base, grid=grid, times=times, theory=theory)
    return Answer("polynomial", "What does the polynomial kernel cost?", text, findings, draw)


def _exactness(generator: torch.Generator) -> list[Finding]:
    """The features against the kernel, with and without the products of two coordinates."""
    kernel = kernels.Polynomial(degree=2, offset=1.0)
    query, key = (torch.randn(50, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = (query @ key.T + 1) ** 2
    difference = float(
        (kernel.query_features(query) @ kernel.key_features(key).T - exact).abs().max() / exact.abs().max()
    )
    cross = (query @ key.T) ** 2 - query**2 @ (key**2).T  # 2 sum_{i<j} q_i q_j k_i k_j
    forgotten = exact - _without_cross_terms(query) @ _without_cross_terms(key).T
    return [
        Finding(
            "features", "number of features, 1 + D + D (D + 1) / 2 at D = 16", 153.0, float(kernel.features_for(16)), 0
        ),
        Finding("exactness", "phi(q).phi(k) against (q.k + 1)^2", 0.0, difference, 1e-12),
        Finding(
            "cross_terms",
            "what [1, sqrt2 x_i, x_i^2] loses: mean size of 2 sum_{i<j} q_i q_j k_i k_j",
            float(cross.abs().mean()),
            float(forgotten.abs().mean()),
            1e-9,
        ),
    ]


def _draw(figure: "Figure", base: dict[str, int], grid: Sizes, times: Series, theory: Series) -> None:
    """Times and the formula, one picture for each size."""
    for axis, (name, sizes) in zip(figure.subplots(1, 3), grid.items(), strict=False):
        axis.loglog(sizes, [t * 1e3 for t in times[name]], "o-", color="C0", label="measured")
        line = [t * times[name][-1] / theory[name][-1] * 1e3 for t in theory[name]]
        axis.loglog(sizes, line, "--", color="C1", label="theory: 4 N r M")
        others = ", ".join(f"{n} = {size}" for n, size in base.items() if n != name)
        axis.set(xlabel=name, ylabel="milliseconds of the sums", title=f"Growth with {name} ({others})")
        axis.set_xticks(sizes, [str(s) for s in sizes], minor=False)
        axis.xaxis.minorticks_off()
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.legend(loc="upper left")
        axis.grid(alpha=0.3)


def _without_cross_terms(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :1]), math.sqrt(2) * x, x**2], -1)


def _formula(N: int, D: int, M: int) -> float:
    """phi(K)^T V and phi(Q) S, a multiply and an add each."""
    return 4.0 * N * (1 + D + D * (D + 1) // 2) * M


def _call(N: int, D: int, M: int, generator: torch.Generator) -> Callable[[], object]:
    query, key = (torch.randn(1, 1, N, D, generator=generator) for _ in range(2))
    value = torch.randn(1, 1, N, M, generator=generator)
    kernel = kernels.Polynomial(degree=2, offset=1.0)
    return lambda: attention(query, key, value, kernel=kernel, engine="torch")


def _sums_alone(N: int, D: int, M: int, generator: torch.Generator) -> Callable[[], object]:
    """The same call with the features made beforehand: what is left is phi(K)^T V and phi(Q) S."""
    kernel = kernels.Polynomial(degree=2, offset=1.0)
    query, key = (kernel.query_features(torch.randn(1, 1, N, D, generator=generator)) for _ in range(2))
    value = torch.randn(1, 1, N, M, generator=generator)
    given = kernels.Custom(lambda features: features, positive=False)
    return lambda: attention(query, key, value, kernel=given, engine="torch")


def _count(call: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())
