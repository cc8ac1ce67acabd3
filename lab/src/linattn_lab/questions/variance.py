"""The variance of a dot product, and why attention divides by sqrt(d)."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from linattn import implied_attention

from .answer import Answer, Finding, exponent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = 64
DIMS = (4, 16, 64, 256, 1024)
MEAN, SPREAD = 0.5, 1.5


def ask(seed: int = 0, quick: bool = False) -> Answer:
    """Draws pairs q, k with independent entries, and attention rows over 64 keys."""
    generator = torch.Generator().manual_seed(seed)
    pairs, rows = (4000, 200) if quick else (40000, 2000)
    variances, largest = [], {"unscaled": [], "scaled": []}  # type: ignore[var-annotated]
    for dim in DIMS:
        variances.append(float(_products(pairs, dim, 0.0, 1.0, generator).var()))
        query = torch.randn(rows, 1, dim, generator=generator)
        key = torch.randn(rows, KEYS, dim, generator=generator)
        for name, scale in (("unscaled", 1.0), ("scaled", dim**-0.5)):
            weights = implied_attention(query.unsqueeze(1), key.unsqueeze(1), "softmax", scale=scale)
            largest[name].append(float(weights.amax(-1).mean()))
    normal = torch.randn(rows * 10, KEYS, generator=generator).softmax(-1).amax(-1).mean()
    shifted = _products(pairs, 64, MEAN, SPREAD, generator)
    noise = 6 / pairs**0.5  # about four standard errors of a variance
    expected_variance = 64 * (SPREAD**4 + 2 * SPREAD**2 * MEAN**2)
    findings = [
        Finding("mean", "E[q.k] = mu.mu, entries of mean 0.5, d = 64", 64 * MEAN**2, float(shifted.mean()), 4 * noise),
        Finding(
            "variance_shifted",
            "Var(q.k) = d (s^4 + 2 s^2 mu^2), s = 1.5",
            expected_variance,
            float(shifted.var()),
            noise,
        ),
        Finding("variance_64", "Var(q.k) = d at mu = 0, s = 1, d = 64", 64.0, variances[2], noise),
        Finding("variance_1024", "Var(q.k) = d at mu = 0, s = 1, d = 1024", 1024.0, variances[4], noise),
        Finding("exponent", "growth of Var(q.k) with d", 1.0, exponent(DIMS, variances), noise),
        Finding(
            "largest_scaled",
            "largest of 64 weights after / sqrt(d), d = 1024: as for normal scores",
            float(normal),
            largest["scaled"][-1],
            0.1,
        ),
        Finding(
            "largest_unscaled",
            "largest of 64 weights without it, d = 1024: all on one key",
            1.0,
            largest["unscaled"][-1],
            0.1,
        ),
    ]

    text = (
        "q.k is a sum of d independent products: its mean is |mu|^2 and, for entries of mean 0 and variance 1, its "
        "variance d. Undivided, scores grow with d until one key takes all the weight and gradients vanish; over "
        "sqrt(d) they keep variance 1 whatever d is."
    )
    draw = partial(_draw, variances=variances, largest=largest, normal=float(normal))
    return Answer("variance", "Why divide by sqrt(d)?", text, findings, draw)


def _draw(figure: "Figure", variances: list[float], largest: dict[str, list[float]], normal: float) -> None:
    """Variances, and the largest weights, over d."""
    left, right = figure.subplots(1, 2)
    left.loglog(DIMS, variances, "o", color="C0", label="measured Var(q.k)")
    left.loglog(DIMS, DIMS, "-", color="C1", label="theory: d")
    left.loglog(
        DIMS,
        [v / d for v, d in zip(variances, DIMS, strict=True)],
        "o",
        color="C2",
        label="measured Var(q.k / sqrt(d))",
    )
    left.loglog(DIMS, [1] * len(DIMS), "--", color="C1", label="theory: 1")
    left.set(xlabel="d", ylabel="variance", title="The dot product spreads with d")
    right.semilogx(DIMS, largest["unscaled"], "o-", color="C3", label="softmax(q.k)")
    right.semilogx(DIMS, largest["scaled"], "o-", color="C0", label="softmax(q.k / sqrt(d))")
    right.axhline(normal, color="C1", ls="--", label="theory: normal scores")
    right.set(
        xlabel="d",
        ylabel=f"mean largest of {KEYS} weights",
        title="Without sqrt(d) attention becomes argmax",
        ylim=(0, 1),
    )
    for axis in (left, right):
        axis.legend()
        axis.grid(alpha=0.3)


def _products(pairs: int, dim: int, mean: float, spread: float, generator: torch.Generator) -> torch.Tensor:
    """(pairs,) dot products of independent vectors."""
    parts = []
    for start in range(0, pairs, 4000):
        shape = (min(4000, pairs - start), dim)
        query, key = (mean + spread * torch.randn(shape, generator=generator) for _ in range(2))
        parts.append((query * key).sum(-1).double())
    return torch.cat(parts)
