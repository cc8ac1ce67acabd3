"""Ways to cluster faces, compared on unseen people: what is free in each is chosen on the people of the other folds."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from sklearn.cluster import HDBSCAN
from sklearn.metrics import silhouette_score

from ...figures import Figure, over_seeds
from ..index.search import squared_distances
from ..verification.clustering import agreement
from ..verification.cut import best_cut

Array = np.ndarray
Fold = tuple[Array, Array]  # unit vectors (N, d) and people (N,)
CUTS = np.arange(0.02, 6, 0.02)
SIZES = np.array([2, 3, 4, 5])
FEW = 3


def _distance(vectors: Array) -> Array:
    found = squared_distances(*[vectors.astype(np.float64)] * 2)
    np.fill_diagonal(found, 0)
    return (found + found.T) / 2


def _tree(method: str) -> Callable[[Fold, Array], Array]:
    def curve(fold: Fold, cuts: Array) -> Array:
        """Pairwise F1 at every cut. Ward's linkage is defined for distances, the others take their squares."""
        distance = _distance(fold[0])
        tree = linkage(squareform(np.sqrt(distance) if method == "ward" else distance, checks=False), method)
        return np.array([agreement(fcluster(tree, cut, "distance"), fold[1].tolist()).f1 for cut in cuts])

    return curve


def _hdbscan(fold: Fold, sizes: Array) -> Array:
    """Pairwise F1 for every smallest size of a cluster; images that it calls noise are alone."""
    found = []
    for size in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the default of `copy`, which is given here
            labels = HDBSCAN(min_cluster_size=int(size), metric="precomputed", copy=True).fit_predict(
                np.sqrt(_distance(fold[0]))
            )
        alone = labels < 0
        labels[alone] = labels.max() + 1 + np.arange(alone.sum())
        found.append(agreement(labels, fold[1].tolist()).f1)
    return np.array(found)


def _silhouette(fold: Fold, _: Array) -> Array:
    """Pairwise F1 of average linkage with the number of clusters that has the highest silhouette."""
    distance = _distance(fold[0])
    tree = linkage(squareform(distance, checks=False), "average")
    tried = {}
    for count in range(2, len(distance) * 2 // 3):
        labels = fcluster(tree, count, "maxclust")
        if 1 < len(np.unique(labels)) < len(labels):
            tried[count] = silhouette_score(distance, labels, metric="precomputed"), labels
    labels = max(tried.values(), key=lambda one: one[0])[1]
    return np.array([agreement(labels, fold[1].tolist()).f1])


WAYS: dict[str, tuple[Callable[[Fold, Array], Array], Array]] = {
    "average linkage, the default": (_tree("average"), CUTS),
    "complete linkage": (_tree("complete"), CUTS),
    "single linkage": (_tree("single"), CUTS),
    "Ward's linkage": (_tree("ward"), CUTS),
    "HDBSCAN": (_hdbscan, SIZES),
    "average linkage, number by silhouette": (_silhouette, np.zeros(1)),
}


def compare(seeds: dict[int, list[Fold]]) -> dict[str, Figure]:
    """Mean pairwise F1 of each way over folds and seeds, with all images and with few of each person; 95 % over folds."""
    found = {}
    for name, (curve, settings) in WAYS.items():
        every: dict[str, list[list[float]]] = {"all images": [], f"{FEW} images of each": []}
        for folds in seeds.values():
            curves = [curve(fold, settings) for fold in folds]
            chosen = [_choose([c for i, c in enumerate(curves) if i != k], settings) for k in range(len(folds))]
            every["all images"].append([float(c[at]) for c, at in zip(curves, chosen, strict=True)])
            few = [curve(_few(fold), settings[[at]]) for fold, at in zip(folds, chosen, strict=True)]
            every[f"{FEW} images of each"].append([float(one[0]) for one in few])
        for column, values in every.items():
            by_fold = np.mean(values, 0).tolist()
            over = over_seeds(by_fold, range(len(by_fold)), ".3f", share=True)
            found[f"clusterings|{name}|{column}"] = Figure(over.value, over.low, over.high, tuple(seeds), ".3f")
    return found


def _choose(curves: Sequence[Array], settings: Array) -> int:
    return best_cut(np.stack(curves)) if len(settings) > len(SIZES) else int(np.argmax(np.mean(curves, 0)))


def _few(fold: Fold) -> Fold:
    vectors, people = fold
    rows = np.concatenate([np.flatnonzero(people == person)[:FEW] for person in np.unique(people)])
    return vectors[rows], people[rows]
