"""Verification: how many pairs of one person are accepted (VAL) when few pairs of two people are (FAR).

Distances are squared; a pair is accepted when its distance is at or under a threshold. Everything here is of people
that training never saw.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

FARS = (1e-2, 1e-3)
Array = np.ndarray


@dataclass(frozen=True)
class Pairs:
    """All pairs among some images: distance, whether they show one person, and the two people by number."""

    distance: Array  # (P,)
    same: Array  # (P,) bool
    left: Array  # (P,) person of the first image
    right: Array

    def __post_init__(self) -> None:
        if not self.same.any() or self.same.all():
            raise ValueError(
                f"verification needs pairs of one person and of two, got {int(self.same.sum())} of {len(self.same)} of one."
            )


def pairs_of(vectors: Array, people: Array) -> Pairs:
    """Pairs of the rows of vectors (N, d), squared distances."""
    vectors, people = np.asarray(vectors, np.float64), np.asarray(people)
    squares = (vectors**2).sum(1)
    distance = squares[:, None] + squares - 2 * vectors @ vectors.T
    return pairs_of_matrix(distance, people)


def pairs_of_matrix(distance: Array, people: Array) -> Pairs:
    """Pairs above the diagonal of a matrix of distances (N, N)."""
    i, j = np.triu_indices(len(people), 1)
    return Pairs(np.maximum(distance[i, j], 0), people[i] == people[j], people[i], people[j])


def cross_pairs(first: Array, second: Array, people: Array) -> Pairs:
    """Pairs of image i by `first` with image j by `second`, i and j different images of the same set."""
    distance = (first**2).sum(1)[:, None] + (second**2).sum(1) - 2 * first @ second.T
    i, j = np.nonzero(~np.eye(len(people), dtype=bool))
    return Pairs(np.maximum(distance[i, j], 0), people[i] == people[j], people[i], people[j])


def threshold_at(pairs: Pairs, far: float) -> float:
    """The largest threshold that accepts at most a share `far` of the pairs of two people."""
    different = np.sort(pairs.distance[~pairs.same])
    allowed = int(np.floor(far * len(different) + 1e-9))
    if allowed >= len(different):
        return float(different[-1])
    return float(np.nextafter(different[allowed], -np.inf))


def val_at_far(pairs: Pairs, far: float) -> float:
    """Share of the pairs of one person that are accepted at that threshold."""
    return float((pairs.distance[pairs.same] <= threshold_at(pairs, far)).mean())


def roc(pairs: Pairs) -> tuple[Array, Array]:
    """FAR and VAL at every threshold, both rising from 0 to 1."""
    order = np.argsort(pairs.distance, kind="stable")
    distance, same = pairs.distance[order], pairs.same[order]
    last = np.append(distance[1:] != distance[:-1], True)  # equal distances are accepted together
    val, far = np.cumsum(same)[last] / same.sum(), np.cumsum(~same)[last] / (~same).sum()
    return np.append(0.0, far), np.append(0.0, val)


def auc(pairs: Pairs) -> float:
    """Chance that a pair of one person is nearer than a pair of two; ties count half."""
    ranks = rankdata(-pairs.distance)
    same = int(pairs.same.sum())
    return float((ranks[pairs.same].sum() - same * (same + 1) / 2) / (same * (len(ranks) - same)))


def best_threshold(pairs: Pairs) -> float:
    """Threshold of the highest accuracy, pairs of one and of two people weighing alike."""
    far, val = roc(pairs)
    levels = np.append(-1.0, np.unique(pairs.distance))
    at = int(np.argmax(val - far))
    return float((levels[at] + levels[min(at + 1, len(levels) - 1)]) / 2)


def accuracy(pairs: Pairs, threshold: float) -> float:
    """Mean of the shares of right answers among pairs of one person and of two."""
    accepted = pairs.distance <= threshold
    return float((accepted[pairs.same].mean() + (~accepted[~pairs.same]).mean()) / 2)


def accuracy_by_folds(folds: list[Pairs]) -> float:
    """Mean accuracy of each fold at the threshold that is best on the others; of a single fold, at its own best."""
    if len(folds) == 1:
        return accuracy(folds[0], best_threshold(folds[0]))
    found = []
    for k, fold in enumerate(folds):
        others = join([other for i, other in enumerate(folds) if i != k])
        found.append(accuracy(fold, best_threshold(others)))
    return float(np.mean(found))


def join(folds: list[Pairs]) -> Pairs:
    return Pairs(
        *(np.concatenate([getattr(fold, name) for fold in folds]) for name in ("distance", "same", "left", "right"))
    )


def figures(folds: list[Pairs]) -> dict[str, float]:
    """What a report says of one method: means over folds, and `pooled` with one threshold for all folds."""
    pooled = join(folds)
    found = {f"val_at_far_{_name(far)}": float(np.mean([val_at_far(fold, far) for fold in folds])) for far in FARS}
    found |= {f"pooled_{_name(far)}": val_at_far(pooled, far) for far in FARS}
    return found | {"auc": float(np.mean([auc(fold) for fold in folds])), "accuracy": accuracy_by_folds(folds)}


def interval(runs: list[list[Pairs]], far: float, against: list[list[Pairs]] | None = None) -> tuple[float, float]:
    """95 % interval of the mean VAL@FAR by bootstrap over PEOPLE: pairs of one person are not independent of each other.

    Args:
        runs: the folds of each seed; the same people are drawn for all seeds.
        against: other runs on the same folds; the interval is then that of the difference, over the same draws of people.
    """
    drawn = _draws(runs, far)
    if against is not None:
        drawn = drawn - _draws(against, far)
    return tuple(float(x) for x in np.quantile(drawn, (0.025, 0.975)))  # type: ignore[return-value]


def _draws(runs: list[list[Pairs]], far: float, draws: int = 400, seed: int = 0) -> Array:
    """Mean VAL@FAR (draws,), each time with other people."""
    generator = np.random.default_rng(seed)
    values = []
    for k in range(len(runs[0])):
        people = np.unique(np.append(runs[0][k].left, runs[0][k].right))
        lots = generator.integers(len(people), size=(draws, len(people)))
        alone = lots.min(1) == lots.max(1)  # one person makes no pair of two
        lots[alone, 0] = (lots[alone, 0] + 1) % len(people)
        counts = (lots[:, :, None] == np.arange(len(people))).sum(1)  # (draws, people)
        values += [_weighted_val(run[k], people, counts, far) for run in runs]
    return np.mean(values, 0)


def _weighted_val(pairs: Pairs, people: Array, counts: Array, far: float) -> Array:
    """VAL@FAR (draws,) with each person `counts` (draws, people) times; copies of one are never a pair of two people."""
    order = np.argsort(pairs.distance, kind="stable")
    same = pairs.same[order]
    left, right = (np.searchsorted(people, side[order]) for side in (pairs.left, pairs.right))
    once = counts[:, left[same]]  # of pairs of one person
    wrong = np.cumsum(counts[:, left[~same]] * counts[:, right[~same]], axis=1)
    allowed = (wrong <= far * wrong[:, -1:]).sum(1)  # pairs of two people that may pass
    rank = np.cumsum(~same)[same]  # pairs of two people nearer than each pair of one
    return (once * (rank <= allowed[:, None])).sum(1) / once.sum(1)


def _name(far: float) -> str:
    return f"1e{int(np.round(np.log10(far)))}"
