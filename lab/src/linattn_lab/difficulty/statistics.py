"""Statistics of the measurements: accuracy by depth, depth by class and ground truth, agreement between networks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student

from ..images import ImageSet
from .depth import bands
from .measurement import Measured
from .runs import Outcome

SIZE_APART, NOISE_APART = "size, that distance held equal", "noise, size held equal"


@dataclass
class ByDepth:
    """Bands of depth (first, last) that hold images, from shallow to deep: how many, and how often the network is right.

    `single` has the same for every depth that occurs: (depth, images, accuracy).
    """

    bands: list[tuple[int, int]]
    counts: list[int]
    accuracy: list[float]
    single: list[tuple[int, int, float]]

    def names(self) -> list[str]:
        return [f"{first}" if first == last else f"{first}-{last}" for first, last in self.bands]


def by_depth(measured: list[Measured]) -> ByDepth:
    """Images of all networks counted together."""
    depth, right = pooled(measured)
    found = ByDepth([], [], [], [])
    for first, last in bands(len(measured[0].probes) + 1):
        inside = (first <= depth) & (depth <= last)
        if inside.any():
            found.bands.append((first, last))
            found.counts.append(int(inside.sum()))
            found.accuracy.append(float(right[inside].mean()))
    found.single = [(int(d), int((depth == d).sum()), float(right[depth == d].mean())) for d in np.unique(depth)]
    return found


def pooled(measured: list[Measured]) -> tuple[np.ndarray, np.ndarray]:
    """Depth and whether the network is right, for every image of every network."""
    return (
        np.concatenate([part.depth.numpy() for part in measured]),
        np.concatenate([part.right.numpy() for part in measured]),
    )


@dataclass
class Findings:
    """All figures of the report. `depth` is each test image's mean over the networks, (N,)."""

    depth: np.ndarray
    accuracy: list[float]  # of each network, on the test images
    probe_accuracy: np.ndarray  # (networks, points)
    test: ByDepth
    held_out: ByDepth | None  # of training images, by networks that have not seen them
    truth: dict[str, tuple[float, float]]  # name -> Spearman's rank correlation of depth with it, and its p
    apart: dict[str, tuple[float, float]]  # the same for the distance from the centre, and with one thing held equal
    class_depth: list[float]
    consistency: np.ndarray  # (networks, networks): rank correlations of their depths

    @property
    def agreement(self) -> float | None:
        """Mean rank correlation of the depths of two networks; None where there is one network, or none can be had."""
        others = self.consistency[np.triu_indices(len(self.consistency), 1)]
        return float(others.mean()) if len(others) and np.isfinite(others).all() else None


def find(outcome: Outcome, images: ImageSet) -> Findings:
    first = outcome.test[0]
    depths = np.stack([part.depth.numpy() for part in outcome.test])  # (networks, N)
    depth, labels, places = depths.mean(0), first.labels.numpy(), first.places.numpy()
    truth = {}
    for name, values in images.test.truth.items():
        rho, p = rank_correlation(depth, values[places])
        if np.isfinite(rho):
            truth[name] = (rho, p)
    nets = range(len(depths))
    seen = [part for part in outcome.held_out if len(part.labels)]
    return Findings(
        depth=depth,
        accuracy=[float(part.right.double().mean()) for part in outcome.test],
        probe_accuracy=np.stack([(part.probes == part.labels).double().mean(1).numpy() for part in outcome.test]),
        test=by_depth(outcome.test),
        held_out=by_depth(seen) if seen else None,
        truth=truth,
        apart=_apart(depth, {name: images.test.truth[name][places] for name in truth}),
        class_depth=[_mean(depth[labels == label]) for label in range(len(images.classes))],
        consistency=np.array([[rank_correlation(depths[a], depths[b])[0] for b in nets] for a in nets]),
    )


def rank_correlation(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Spearman's rho and its p; NaN where one of the two does not vary."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan"), float("nan")
    found = spearmanr(one, other)
    return float(found.statistic), float(found.pvalue)


def partial_rank_correlation(one: np.ndarray, other: np.ndarray, given: np.ndarray) -> tuple[float, float]:
    """Correlation of two ranks after what the rank of a third says of each is taken out, and its p."""
    known = np.stack([np.ones(len(given)), rankdata(given)], 1)
    left = [rankdata(x) - known @ np.linalg.lstsq(known, rankdata(x), rcond=None)[0] for x in (one, other)]
    rho = float(np.corrcoef(*left)[0, 1])
    freedom = len(given) - 3
    return rho, float(2 * student.sf(abs(rho) * (freedom / max(1 - rho**2, 1e-300)) ** 0.5, freedom))


def correlations(depth: np.ndarray, truth: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Spearman's rank correlation of depth with each truth that varies, and those of `_apart`, each with its p."""
    found = {name: rank_correlation(depth, values) for name, values in truth.items()}
    found = {name: one for name, one in found.items() if np.isfinite(one[0])}
    return found | _apart(depth, {name: truth[name] for name in found})


def _apart(depth: np.ndarray, truth: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Large shapes have less room to move, so size is also seen apart from how far off the centre a shape lies."""
    found = {}
    if {"size", "x", "y"} <= set(truth):
        off = np.hypot(truth["x"] - truth["x"].mean(), truth["y"] - truth["y"].mean())
        found["distance from the centre"] = rank_correlation(depth, off)
        found[SIZE_APART] = partial_rank_correlation(depth, truth["size"], off)
    if {"size", "noise"} <= set(truth):
        found[NOISE_APART] = partial_rank_correlation(depth, truth["noise"], truth["size"])
    return found


def say_p(p: float) -> str:
    return f"p = {p:.1g}" if p > 0 else "p < 1e-300"  # smaller than a float can be


def for_machines(findings: Findings) -> dict[str, Any]:
    """The figures of --json. What the data has no truth for is null; accuracy goes from the shallowest band to the deepest."""
    noise, size = (findings.truth.get(name, (None, None)) for name in ("noise", "size"))
    size_apart, noise_apart = (findings.apart.get(name, (None, None)) for name in (SIZE_APART, NOISE_APART))
    return {
        "spearman_noise": noise[0],
        "p_noise": noise[1],
        "spearman_size": size[0],
        "p_size": size[1],
        "accuracy_by_depth": findings.test.accuracy,
        "spearman_size_at_equal_place": size_apart[0],
        "p_size_at_equal_place": size_apart[1],
        "spearman_noise_at_equal_size": noise_apart[0],
        "p_noise_at_equal_size": noise_apart[1],
        "depth_bands": findings.test.names(),
        "depth_counts": findings.test.counts,
        "accuracy_at_each_depth": {str(depth): accuracy for depth, _, accuracy in findings.test.single},
        "accuracy": findings.accuracy,
        "held_out_accuracy_by_depth": findings.held_out.accuracy if findings.held_out else None,
        "consistency": findings.agreement,
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
