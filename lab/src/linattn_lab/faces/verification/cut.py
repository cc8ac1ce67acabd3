"""Where clustering stops, chosen on people that were held out from training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..index.search import squared_distances
from .clustering import agreement

Array = np.ndarray
STEP = 0.01
SMOOTH = 11  # cuts that are averaged, so that the choice lies in the middle of what does well
LARGEST = 3000  # images of a group; more are left out, whole people at a time


@dataclass(frozen=True)
class Cut:
    """Mean squared distance up to which clusters merge, and the pairwise F1 there of each group, and with the best cut."""

    value: float
    f1: list[float]
    best: list[float]

    def facts(self) -> dict[str, Any]:
        return {"f1": self.f1, "f1_with_the_best_cut_of_each": self.best}

    def text(self) -> str:
        f1 = ", ".join(f"{x:.3f}" for x in self.f1)
        return f"clusters merge up to a mean squared distance of {self.value:.3f}: pairwise F1 {f1} on held-out people"


def choose_cut(groups: Sequence[tuple[Array, Array]]) -> Cut:
    """The cut with the highest mean of the groups' pairwise F1 (smoothed over nearby cuts).

    Args:
        groups: unit vectors (N, d) and people (N,), each group by a network that was not trained on it.
    """
    cuts = np.arange(STEP, 4, STEP)
    curves = np.stack([_curve(*_limited(vectors, people), cuts) for vectors, people in groups])
    at = best_cut(curves)
    return Cut(float(cuts[at]), curves[:, at].tolist(), curves.max(1).tolist())


def best_cut(curves: Array) -> int:
    """The place of the highest mean of F1 (groups, cuts), smoothed over nearby cuts."""
    window = np.hanning(SMOOTH + 2)[1:-1]
    padded = np.pad(curves.mean(0), SMOOTH // 2, mode="edge")
    return int(np.argmax(np.convolve(padded, window / window.sum(), mode="valid")))


def _curve(vectors: Array, people: Array, cuts: Array) -> Array:
    """Pairwise F1 at every cut of one tree."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    distance = squared_distances(*[vectors.astype(np.float64)] * 2)
    np.fill_diagonal(distance, 0)
    tree = linkage(squareform((distance + distance.T) / 2, checks=False), "average")
    found = np.empty(len(cuts))
    merges = np.searchsorted(tree[:, 2], cuts, side="right")
    for count in np.unique(merges):
        height = tree[count - 1, 2] if count else -1.0
        labels = fcluster(tree, height, "distance")
        found[merges == count] = agreement(labels, people.tolist()).f1
    return found


def _limited(vectors: Array, people: Array) -> tuple[Array, Array]:
    if len(people) <= LARGEST:
        return vectors, people
    names, counts = np.unique(people, return_counts=True)
    kept = np.isin(people, names[np.cumsum(counts) <= LARGEST])
    return vectors[kept], people[kept]
