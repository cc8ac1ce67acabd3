"""A threshold for a rate of false accepts, with its interval.

Pairs come in groups: each was held out from the training of the network that embedded it, so pairs are formed within a
group alone. Pairs that share a person are not independent, so intervals are a bootstrap over people.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .metrics import Pairs, join, threshold_at

Array = np.ndarray
DRAWS = 400
REACH = 20  # the nearest pairs, as many times the wanted rate, are enough for every draw


@dataclass(frozen=True)
class Threshold:
    """What was chosen for a rate of false accepts.

    Attributes:
        far: the rate asked for.
        value: squared distance up to which two images are taken for one person.
        low, high: 95 % of the thresholds that other people of the kind would have led to.
        far_95: 95 % interval of the rate of false accepts at `value`, over the same draws.
        val: share of the pairs of one person that are accepted at `value`.
        people: how many there were to choose by.
        pairs: of two people.
    """

    far: float
    value: float
    low: float
    high: float
    far_95: tuple[float, float]
    val: float
    people: int
    pairs: int

    def facts(self) -> dict[str, Any]:
        """For JSON; `value` is the model's threshold and stands beside it."""
        return {
            "far": self.far,
            "threshold_95": [self.low, self.high],
            "far_95": list(self.far_95),
            "val": self.val,
            "people_to_choose_by": self.people,
            "pairs_to_choose_by": self.pairs,
        }

    def text(self) -> str:
        said = (
            f"threshold {self.value:.3f} (95 % over people: {self.low:.3f} to {self.high:.3f}) for a rate of false accepts "
            f"of {self.far:g}\nheld-out people: {self.people}, {self.pairs} pairs of two; with this threshold the rate is "
            f"within {self.far_95[0]:.4f} to {self.far_95[1]:.4f} (95 % over people), and {self.val:.3f} of the pairs of one "
            "person are accepted"
        )
        if self.far * self.pairs < 1:
            said += f"\n{self.pairs} pairs cannot show a rate of {self.far:g}: more people, or a larger --far"
        return said


def choose_threshold(groups: Sequence[Pairs], far: float, seed: int = 0) -> Threshold:
    """The largest threshold that accepts at most a share `far` of the pairs of two people, all groups together."""
    if not 0 < far < 1:
        raise ValueError(f"a rate of false accepts is between 0 and 1, got {far}.")
    near, total = _nearest(groups, far)
    value = threshold_at(join(list(groups)), far)
    thresholds, weights = [], []
    distance = np.concatenate([part.distance for part in near])
    order = np.argsort(distance, kind="stable")
    distance = distance[order]
    for weight, whole in _draws(near, total, seed):
        passed = np.cumsum(weight[order])
        at = int(np.searchsorted(passed, far * whole, side="right"))
        thresholds.append(float(np.nextafter(distance[min(at, len(distance) - 1)], -np.inf)))
        weights.append((passed, whole))
    inside = int(np.searchsorted(distance, value, side="right"))
    rates = [float(passed[inside - 1] / whole) if inside else 0.0 for passed, whole in weights]
    same = np.concatenate([group.distance[group.same] for group in groups])
    low, high = np.quantile(thresholds, (0.025, 0.975))
    people = sum(len(np.unique(np.append(group.left, group.right))) for group in groups)
    return Threshold(
        far,
        value,
        min(float(low), value),
        max(float(high), value),
        (float(np.quantile(rates, 0.025)), float(np.quantile(rates, 0.975))),
        float((same <= value).mean()),
        people,
        sum(int((~group.same).sum()) for group in groups),
    )


@dataclass(frozen=True)
class _Near:
    """The nearest pairs of two people of a group: distance and the two people by number from 0."""

    distance: Array
    left: Array
    right: Array


def _nearest(groups: Sequence[Pairs], far: float) -> tuple[list[_Near], list[Array]]:
    """The pairs of two people that could pass in some draw, and how many images each person of a group has."""
    every = np.concatenate([group.distance[~group.same] for group in groups])
    share = min(1.0, REACH * far + 100 / len(every))
    limit = np.quantile(every, share)
    near, images = [], []
    for group in groups:
        people = np.unique(np.append(group.left, group.right))
        chosen = ~group.same & (group.distance <= limit)
        left, right = (np.searchsorted(people, side) for side in (group.left, group.right))
        near.append(_Near(group.distance[chosen], left[chosen], right[chosen]))
        images.append(_images(group, left, right, len(people)))
    return near, images


def _images(group: Pairs, left: Array, right: Array, people: int) -> Array:
    """Images of each person, out of the pairs: every image is in as many pairs as there are other images."""
    whole = (1 + np.sqrt(1 + 8 * len(group.same))) / 2
    return (np.bincount(left, minlength=people) + np.bincount(right, minlength=people)) / (whole - 1)


def _draws(near: Sequence[_Near], images: Sequence[Array], seed: int) -> Iterator[tuple[Array, float]]:
    """Weights of the nearest pairs with people drawn anew, and the weight of all pairs of two people."""
    generator = np.random.default_rng(seed)
    for _ in range(DRAWS):
        weights, whole = [], 0.0
        for part, counts in zip(near, images, strict=True):
            drawn = np.bincount(generator.integers(len(counts), size=len(counts)), minlength=len(counts))
            if (drawn > 0).sum() < 2:  # one person makes no pair of two
                drawn = np.ones(len(counts), np.int64)
            weights.append((drawn[part.left] * drawn[part.right]).astype(np.float64))
            present = drawn * counts
            whole += float(present.sum() ** 2 - (present**2).sum()) / 2
        yield np.concatenate(weights), whole
