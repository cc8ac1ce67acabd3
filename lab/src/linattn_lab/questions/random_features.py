"""Random features of softmax: unbiased, with an error that falls as 1 / sqrt(r), and only with the right variance."""

import math
import warnings
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linattn import kernels

from .answer import Answer, Finding, exponent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIM, PAIRS, SIZE = 16, 64, 0.5
Series = dict[str, list[float]]


def ask(seed: int = 0, quick: bool = False) -> Answer:
    """Estimates exp(q.k / sqrt(D)) for 64 pairs by each kind of feature, many times."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (SIZE * torch.randn(PAIRS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    draws = 16 if quick else 32
    counts = [2**n for n in range(4, 11 if quick else 13)]
    exact = ((query * key).sum(-1) / math.sqrt(DIM)).exp()
    x, y = query / DIM**0.25, key / DIM**0.25
    # Variance of one feature's estimate over the square of the truth.
    theory = {
        "positive": ((x + y).square().sum(-1)).exp() - 1,
        "trig": (1 - (-(x - y).square().sum(-1)).exp()) ** 2 / 2 * ((x - y).square().sum(-1)).exp(),
    }
    errors, bias = _errors(query, key, exact, counts, draws, seed, theory)
    predicted = {kind: [float((theory[kind] / r).mean().sqrt()) for r in counts] for kind in theory}

    sigma2 = math.sqrt(DIM)
    distance = (query - key).square().sum(-1)
    kernel_true, kernel_wrong = (-distance / (2 * sigma2)).exp(), (-distance * sigma2 / 2).exp()
    right = [_rms(_gaussian(r, seed, query, key, 1.0) - kernel_true) for r in counts]
    printed = [_rms(_gaussian(r, seed, query, key, sigma2) - kernel_true) for r in counts]
    stuck = _rms(kernel_wrong - kernel_true)
    at, last = counts.index(256), counts[-1]
    unbiased = f"squared z of the mean of {draws} draws, {{}}: 1 without bias"
    findings = [
        *(Finding(f"bias_{kind.split()[-1]}", unbiased.format(kind), 1.0, z, 1.0) for kind, z in bias.items()),
        Finding(
            "exponent_positive",
            "growth of the error with r, positive",
            -0.5,
            exponent(counts, errors["positive"]),
            0.15,
        ),
        Finding("exponent_trig", "growth of the error with r, trig", -0.5, exponent(counts, errors["trig"]), 0.1),
        Finding(
            "error_positive",
            "error at r = 256, positive: sqrt(mean (exp(norm(q'+k')^2) - 1) / r)",
            predicted["positive"][at],
            errors["positive"][at],
            0.3,
        ),
        Finding("error_trig", "error at r = 256, trig", predicted["trig"][at], errors["trig"][at], 0.2),
        Finding("right_variance", f"error with w ~ N(0, I / sigma^2), r = {last}", 0.0, right[-1], 0.05),
        Finding(
            "wrong_variance", f"error with the printed w ~ N(0, sigma^2 I), r = {last}: stays", stuck, printed[-1], 0.1
        ),
    ]

    text = (
        "Both kinds of features estimate exp(q.k / sqrt(D)) without bias, with a variance known in closed form. The "
        "frequencies must be drawn with variance 1 / sigma^2: drawn with sigma^2, as lecture notes print it, they "
        "estimate exp(-sigma^2 |q-k|^2 / 2) instead, and no number of features mends that."
    )
    gaussian = {"w ~ N(0, I / sigma^2)": right, "w ~ N(0, sigma^2 I), as printed": printed}
    draw = partial(_draw, counts=counts, errors=errors, predicted=predicted, gaussian=gaussian, stuck=stuck)
    return Answer("random-features", "Do random features give softmax?", text, findings, draw)


def _errors(
    query: Tensor, key: Tensor, exact: Tensor, counts: list[int], draws: int, seed: int, theory: dict[str, Tensor]
) -> tuple[Series, dict[str, float]]:
    """Relative errors by kind and number of features, and the bias of the largest number."""
    kinds = ("positive", "positive, orthogonal", "trig")
    errors: Series = {}
    bias: dict[str, float] = {}
    for kind in kinds:
        errors[kind] = []
        for r in counts:
            ratios = torch.stack([_estimate(kind, r, seed + 1 + i, query, key) / exact for i in range(draws)])
            errors[kind].append(float((ratios - 1).square().mean().sqrt()))
        # The mean of the last estimates in its own standard errors, squared: 1 on average if there is no bias.
        standard = theory.get(kind, theory["positive"]) / (counts[-1] * draws)
        bias[kind] = float(((ratios.mean(0) - 1).square() / standard).mean())
    return errors, bias


def _draw(
    figure: "Figure", counts: list[int], errors: Series, predicted: Series, gaussian: Series, stuck: float
) -> None:
    """errors, predicted: of softmax features by kind. gaussian: of the Gaussian kernel by how frequencies were drawn."""
    left, right = figure.subplots(1, 2)
    for color, kind in zip(("C0", "C2", "C4"), errors, strict=True):
        left.loglog(counts, errors[kind], "o", color=color, label=f"{kind}, measured")
        if kind in predicted:
            left.loglog(counts, predicted[kind], "-", color=color, label=f"{kind}, theory")
    left.set(xlabel="features r", ylabel="relative error", title="The error falls as 1 / sqrt(r)")
    for color, (label, series) in zip(("C0", "C3"), gaussian.items(), strict=True):
        right.loglog(counts, series, "o-", color=color, label=label)
    right.axhline(stuck, color="C1", ls="--", label="theory: distance to exp(-sigma^2 |q-k|^2 / 2)")
    right.set(xlabel="frequencies r", ylabel="error of the Gaussian kernel", title="The printed variance is wrong")
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)


def _estimate(kind: str, r: int, seed: int, query: Tensor, key: Tensor) -> Tensor:
    """(pairs,) phi(q).phi(k)."""
    kernel: kernels.Kernel
    if kind == "trig":
        kernel = _plain_trig(r, seed)
    else:
        kernel = kernels.Positive(DIM, r, orthogonal="orthogonal" in kind, seed=seed)
    return (kernel.query_features(query) * kernel.key_features(key)).sum(-1)


def _gaussian(r: int, seed: int, query: Tensor, key: Tensor, factor: float) -> Tensor:
    """(pairs,) estimates of exp(-|q-k|^2 / 2 sigma^2) with the right frequencies times `factor`."""
    kernel = _plain_trig(r, seed)
    kernel.projection *= factor
    return (kernel.scaled_query_features(query)[0] * kernel.scaled_key_features(key)[0]).sum(-1)


def _plain_trig(r: int, seed: int) -> kernels.Trig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that the plain form is for study, which this is
        return kernels.Trig(DIM, r, normalize=False, seed=seed)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
