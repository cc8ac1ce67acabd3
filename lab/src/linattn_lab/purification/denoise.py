"""Noisy images made clean: the purifier against truncated PCA, each with its setting chosen on held-out pictures."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .purifier import LinearPurifier

Array = np.ndarray


def add_noise(clean: Array, sigma: float, rng: np.random.Generator) -> Array:
    """Independent normal noise; not clipped, so that its variance is what it says."""
    return clean + sigma * rng.standard_normal(clean.shape)


def psnr(estimate: Array, clean: Array) -> float:
    """Peak signal to noise in dB, for images from 0 to 1."""
    return _decibel(((estimate - clean) ** 2).mean())


def _decibel(mean_square: float) -> float:
    return -10 * math.log10(mean_square)


@dataclass(frozen=True)
class Sweep:
    """A family of filters tried on held-out images: what was tried, the gain in dB of each, and the best."""

    settings: list[float]
    gains: list[float]

    @property
    def best(self) -> float:
        return self.settings[int(np.argmax(self.gains))]


def sweep_lambda(purifier: LinearPurifier, noisy: Array, clean: Array, lambdas: list[float]) -> Sweep:
    """One fit serves every lambda: only the shrinkage changes."""
    return _sweep(purifier, noisy, clean, lambdas, purifier.shrinkage)


def sweep_rank(purifier: LinearPurifier, noisy: Array, clean: Array, ranks: list[float]) -> Sweep:
    """Truncated PCA on the same directions: the first `rank` are kept whole, the rest dropped."""
    return _sweep(purifier, noisy, clean, ranks, lambda rank: _first(purifier, rank))


def _first(purifier: LinearPurifier, rank: float) -> Array:
    return (np.arange(len(purifier.components_)) < rank).astype(float)


def _sweep(
    purifier: LinearPurifier, noisy: Array, clean: Array, settings: list[float], weights: Callable[[float], Array]
) -> Sweep:
    """Errors are summed in the directions' own coordinates, where a filter is one number for each."""
    before = psnr(noisy, clean)
    of_noisy, of_clean = noisy @ purifier.components_.T, clean @ purifier.components_.T  # (n, directions)
    outside = (clean**2).sum() - (of_clean**2).sum()
    errors = [((of_noisy * weights(s) - of_clean) ** 2).sum() + outside for s in settings]
    return Sweep(settings, [_decibel(error / clean.size) - before for error in errors])


def _filter(purifier: LinearPurifier, noisy: Array, weights: Array) -> Array:
    return (noisy @ purifier.components_.T * weights) @ purifier.components_


@dataclass(frozen=True)
class Result:
    """What came of one data set.

    Attributes:
        noisy_psnr: of the test images before.
        gain: dB on the test images, by method: "purifier" (fitted to clean images), "pca" (best rank, clean),
            "purifier, noisy" and "pca, noisy" (fitted to noisy images alone).
        lambda_sweep, rank_sweep: on the held-out images, fitted to clean ones.
        examples: rows of images (clean, noisy, purified, PCA), each (k, height, width).
    """

    name: str
    train: int
    sigma: float
    noisy_psnr: float
    gain: dict[str, float]
    lambda_sweep: Sweep
    rank_sweep: Sweep
    wiener: float
    examples: dict[str, Array]


def denoise(
    name: str, train: Array, held_out: Array, test: Array, *, sigma: float, seed: int, pictures: int = 8
) -> Result:
    """Fits to `train`, chooses lambda and rank on `held_out`, measures on `test`; images (n, height, width), 0 to 1."""
    rng = np.random.default_rng(seed)
    shape = test.shape[1:]
    train, held_out, test = (x.reshape(len(x), -1) for x in (train, held_out, test))
    noisy_train, noisy_held, noisy_test = (add_noise(x, sigma, rng) for x in (train, held_out, test))
    wiener = len(train) * sigma**2
    lambdas = [wiener * 2.0**e for e in np.arange(-5, 5.5, 0.5)]
    gain: dict[str, float] = {}
    filtered: dict[str, Array] = {}
    sweeps: dict[str, tuple[Sweep, Sweep]] = {}
    before = psnr(noisy_test, test)
    for suffix, samples in (("", train), (", noisy", noisy_train)):
        purifier = LinearPurifier(lam=wiener).fit(samples)
        by_lambda = sweep_lambda(purifier, noisy_held, held_out, lambdas)
        by_rank = sweep_rank(purifier, noisy_held, held_out, _ranks(len(purifier.components_)))
        purified = _filter(purifier, noisy_test, purifier.shrinkage(by_lambda.best))
        truncated = _filter(purifier, noisy_test, _first(purifier, by_rank.best))
        gain[f"purifier{suffix}"] = psnr(purified, test) - before
        gain[f"pca{suffix}"] = psnr(truncated, test) - before
        sweeps[suffix] = by_lambda, by_rank
        if not suffix:
            filtered = {"clean": test, "noisy": noisy_test, "purified": purified, "PCA": truncated}
    chosen = np.linspace(0, len(test) - 1, pictures).astype(int)
    examples = {row: x[chosen].reshape(-1, *shape) for row, x in filtered.items()}
    return Result(name, len(train), sigma, before, gain, *sweeps[""], wiener, examples)


def _ranks(directions: int) -> list[float]:
    """Every small rank, then in steps of an eighth, and all."""
    ranks: list[float] = []
    rank = 1
    while rank < directions:
        ranks.append(rank)
        rank += max(1, rank // 8)
    return [*ranks, directions]
