"""Pairs of labelled images around the threshold: narrowly right, narrowly wrong, and the worst errors."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..index.search import squared_distances

# Every pair's distance is kept: 50 million of 4 bytes.
LARGEST = 10_000


@dataclass(frozen=True, order=True)
class Pair:
    """Two images by their places. Pairs compare by `key`: how soon one is shown."""

    key: float
    first: int
    second: int
    distance: float


@dataclass
class Pairs:
    """All pairs of labelled images, and those worth looking at."""

    same: np.ndarray  # squared distances of pairs of one person, sorted
    different: np.ndarray  # and of different people, sorted
    threshold: float
    shown: dict[str, list[Pair]]  # "accepted", "missed", "rejected", "mistaken", "worst missed", "worst mistaken"

    def accepted(self, threshold: float | None = None) -> float:
        """VAL: share of pairs of one person within the threshold."""
        return _share(self.same, self.threshold if threshold is None else threshold)

    def mistaken(self, threshold: float | None = None) -> float:
        """FAR: share of pairs of different people within the threshold."""
        return _share(self.different, self.threshold if threshold is None else threshold)

    def count(self, kind: str) -> int:
        """Pairs of a kind in all."""
        accepted = int(np.searchsorted(self.same, np.float32(self.threshold), side="right"))
        mistaken = int(np.searchsorted(self.different, np.float32(self.threshold), side="right"))
        counts = {"accepted": accepted, "missed": len(self.same) - accepted}
        counts |= {"mistaken": mistaken, "rejected": len(self.different) - mistaken}
        return counts[kind.removeprefix("worst ")]

    def threshold_for(self, far: float) -> float:
        """The largest threshold that mistakes at most this share of pairs of different people."""
        allowed = int(far * len(self.different) + 1e-9)
        if allowed >= len(self.different):
            return 4.0
        return max(0.0, float(np.nextafter(np.float32(self.different[allowed]), np.float32(-1))))


def find_pairs(embeddings: np.ndarray, people: list[Any], threshold: float, show: int = 12) -> Pairs:
    """Looks at every pair of labelled unit rows (N, D).

    Args:
        embeddings, people: of images; those with no person (None) are passed over.
        threshold: squared distance up to which a pair is taken for one person.
        show: pairs of each kind to keep.
    """
    places = np.array([i for i, person in enumerate(people) if person is not None], np.int64)
    names = np.unique(np.array([str(people[i]) for i in places], dtype=str), return_inverse=True)[1]
    count = len(np.unique(names))
    if len(places) > LARGEST:
        raise ValueError(f"{len(places)} pictures make too many pairs: take at most {LARGEST}.")
    if count < 2 or count == len(places):
        raise ValueError(
            f"{len(places)} pictures of {count} people make no pairs to judge by: put pictures into a folder for each "
            "person, at least two people and two pictures of one."
        )
    same, different = [], []
    shown: dict[str, list[Pair]] = {}
    for first, second, apart in _portions(embeddings[places]):
        one, near, gap = names[first] == names[second], apart <= threshold, np.abs(apart - threshold)
        same.append(apart[one])
        different.append(apart[~one])
        wanted = {
            "accepted": (one & near, gap),
            "missed": (one & ~near, gap),
            "rejected": (~one & ~near, gap),
            "mistaken": (~one & near, gap),
            "worst missed": (one & ~near, -gap),
            "worst mistaken": (~one & near, -gap),
        }
        for kind, (chosen, key) in wanted.items():
            rows = np.flatnonzero(chosen)
            if len(rows) > show:
                rows = rows[np.argpartition(key[rows], show)[:show]]
            found = [Pair(float(key[r]), int(places[first[r]]), int(places[second[r]]), float(apart[r])) for r in rows]
            shown[kind] = heapq.nsmallest(show, [*shown.get(kind, []), *found])
    return Pairs(np.sort(np.concatenate(same)), np.sort(np.concatenate(different)), threshold, shown)


def _portions(embeddings: np.ndarray, rows: int = 256) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Every pair once: places (M,), (M,) and squared distances (M,)."""
    for start in range(0, len(embeddings), rows):
        apart = squared_distances(embeddings[start : start + rows], embeddings[start:])
        first, second = np.triu_indices(len(apart), 1, apart.shape[1])
        yield first + start, second + start, apart[first, second]


def _share(distances: np.ndarray, threshold: float) -> float:
    return float(np.searchsorted(distances, np.float32(threshold), side="right") / max(1, len(distances)))
