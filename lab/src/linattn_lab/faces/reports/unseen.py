"""The threshold and the cut that `faces train` chooses, on people that it has not seen: folds of the ORL faces."""

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from ...data.orl import PEOPLE
from ...figures import Figure, over_seeds
from ..images import Pictures
from ..training.fit import Choice, learn, read
from ..training.recipe import VERSION, Recipe
from ..verification.clustering import agreement, cluster
from ..verification.metrics import Pairs, pairs_of
from .orl_protocol import FOLDS, fold_of, people_of

Array = np.ndarray
COLUMNS = ("FAR", "VAL", "pairwise F1", "clusters")


@dataclass(frozen=True)
class UnseenJob:
    """What `linattn lab faces train` does with 30 people, and the vectors of the 10 people of a fold."""

    recipe: Recipe
    choice: Choice
    fold: int
    seed: int

    def name(self) -> str:
        facts = ["unseen", VERSION, asdict(self)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]

    def run(self) -> dict[str, Tensor]:
        start = time.process_time()
        known, tested = _parted(read("orl", self.recipe.spec), self.fold)
        embedder = learn(self.recipe, known, self.choice, self.seed, None, show=False)
        numbers = [embedder.threshold, *embedder.about["threshold_95"], embedder.cut]
        return {
            "vectors": embedder.embed(tested.images),
            "numbers": torch.tensor(numbers, dtype=torch.double),
            "seconds": torch.tensor(time.process_time() - start),
        }


def _parted(pictures: Pictures, fold: int) -> tuple[Pictures, Pictures]:
    """Images of the people of other folds, and of this one."""
    parts = Pictures(), Pictures()
    folds = fold_of(np.repeat(np.arange(PEOPLE), len(pictures) // PEOPLE))
    for at, number in enumerate(folds):
        part = parts[int(number == fold)]
        part.paths.append(pictures.paths[at])
        part.people.append(pictures.people[at])
        part.images.append(pictures.images[at])
    return parts


@dataclass(frozen=True)
class Seen:
    """What came of one fold and seed."""

    fold: int
    seed: int
    threshold: tuple[float, float, float]  # value, low, high
    cut: float
    figures: dict[str, float]  # by COLUMNS
    without: dict[str, list[float]]  # F1 and clusters with each person left out
    pairs: Pairs


def look(job: UnseenJob, result: dict[str, Array]) -> Seen:
    """FAR and VAL at the threshold that was chosen, and clusters at the cut."""
    value, low, high, cut = (float(x) for x in result["numbers"])
    people = people_of(job.fold)
    pairs = pairs_of(result["vectors"], people)
    accepted = pairs.distance <= value
    found = {"FAR": float(accepted[~pairs.same].mean()), "VAL": float(accepted[pairs.same].mean())}
    found |= _clusters(result["vectors"], people, cut)
    others = [people != person for person in np.unique(people)]
    left = [_clusters(result["vectors"][rows], people[rows], cut) for rows in others]
    without = {name: [one[name] for one in left] for name in left[0]}
    return Seen(job.fold, job.seed, (value, low, high), cut, found, without, pairs)


def _clusters(vectors: Array, people: Array, cut: float) -> dict[str, float]:
    labels = cluster(vectors, cut)
    several = float((np.bincount(labels) > 1).sum())
    return {"pairwise F1": agreement(labels, people.tolist()).f1, "clusters": several}


def figures_of(seen: list[Seen]) -> dict[str, Figure]:
    """Means over seeds of each fold, and of all. 95 % over people: bootstrap of FAR and VAL, jackknife of F1 and clusters.

    F1 and clusters of all folds: Student's t over folds.
    """
    seeds = tuple(sorted({one.seed for one in seen}))
    found: dict[str, Figure] = {}
    for fold in range(FOLDS):
        own = [one for one in seen if one.fold == fold]
        row = f"unseen|people {10 * fold + 1} to {10 * fold + 10}"
        for column in COLUMNS:
            found[f"{row}|{column}"] = _figure(column, own, seeds)
    for column in COLUMNS:
        by_fold = [found[f"unseen|people {10 * fold + 1} to {10 * fold + 10}|{column}"].value for fold in range(FOLDS)]
        whole = _figure(column, seen, seeds)
        if column in seen[0].without:
            over = over_seeds(by_fold, range(FOLDS), share=column == "pairwise F1")
            whole = Figure(over.value, over.low, over.high, seeds, whole.format)
        found[f"unseen|all folds|{column}"] = whole
    return found


def _figure(column: str, own: list[Seen], seeds: tuple[int, ...]) -> Figure:
    form = {"FAR": ".4f", "clusters": ".1f"}.get(column, ".3f")
    mean = float(np.mean([one.figures[column] for one in own]))
    if column in ("FAR", "VAL"):
        low, high = np.quantile(_draws(own, same=column == "VAL"), (0.025, 0.975))
    else:
        left = np.mean([one.without[column] for one in own], 0)  # (people,)
        error = np.sqrt((len(left) - 1) * np.var(left))
        reach = float(student.ppf(0.975, len(left) - 1) * error)
        low, high = max(0.0, mean - reach), mean + reach
        high = min(1.0, high) if column == "pairwise F1" else high
    return Figure(mean, min(float(low), mean), max(float(high), mean), seeds, form)


def _draws(seen: list[Seen], same: bool, draws: int = 400) -> Array:
    """The mean share of accepted pairs (draws,) with the people of each fold drawn anew, alike for all seeds."""
    means = []
    for one in seen:
        generator = np.random.default_rng(one.fold)
        people = np.unique(one.pairs.left)
        people = np.unique(np.append(people, one.pairs.right))
        lots = generator.integers(len(people), size=(draws, len(people)))
        counts = (lots[:, :, None] == np.arange(len(people))).sum(1)  # (draws, people)
        chosen = one.pairs.same == same
        left, right = (np.searchsorted(people, side[chosen]) for side in (one.pairs.left, one.pairs.right))
        accepted = one.pairs.distance[chosen] <= one.threshold[0]
        weights = counts[:, left] * (1 if same else counts[:, right])
        means.append((weights * accepted).sum(1) / np.maximum(weights.sum(1), 1))
    return np.mean(means, 0)


def facts_of(seen: list[Seen]) -> list[dict[str, Any]]:
    """For --json."""
    return [
        {"fold": one.fold, "seed": one.seed, "threshold": one.threshold[0], "threshold_95": list(one.threshold[1:])}
        | {"cut": one.cut}
        | one.figures
        for one in seen
    ]
