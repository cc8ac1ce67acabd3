"""Agglomerative clustering of faces, down to the distance threshold."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..index.search import squared_distances

# Distances of a group are held in memory at once, 8 bytes for each pair: 3.2 GB.
LARGEST_GROUP = 20_000


def cluster(embeddings: np.ndarray, threshold: float) -> np.ndarray:
    """Cluster (N,) of each unit row (N, D): numbers from 0, the largest cluster first, equal ones in order of first row.

    Clusters merge while the mean squared distance of their members is at most the threshold. Such a pair of clusters has
    two members at most that far apart; so groups that no such pair joins are clustered one by one, with the same result.
    """
    labels = np.empty(len(embeddings), np.int64)
    count = 0
    for rows in _groups(embeddings, threshold):
        inside = _agglomerate(embeddings[rows], threshold)
        labels[rows] = inside + count
        count += int(inside.max()) + 1
    _, first, labels, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    order = np.lexsort((first, -sizes))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[labels]


def typical_first(embeddings: np.ndarray, labels: np.ndarray) -> list[list[int]]:
    """Rows of each cluster, the one nearest the cluster's mean first, so that what may not belong comes last."""
    found = []
    for label in range(int(labels.max(initial=-1)) + 1):
        rows = np.flatnonzero(labels == label)
        towards = embeddings[rows] @ embeddings[rows].mean(0)
        found.append(rows[np.argsort(-towards, kind="stable")].tolist())
    return found


@dataclass(frozen=True)
class Agreement:
    """Clusters against people, over all pairs of pictures."""

    precision: float  # of pairs put together, the share that is one person
    recall: float  # of pairs of one person, the share that was put together

    @property
    def f1(self) -> float:
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def agreement(labels: np.ndarray, people: list[Any]) -> Agreement:
    """How well clusters match people; 1 where there is no pair to judge by."""

    def pairs(names: np.ndarray) -> int:
        sizes = np.unique(names, return_counts=True)[1]
        return int((sizes * (sizes - 1) // 2).sum())

    numbers = np.unique(np.array(people, dtype=str), return_inverse=True)[1]
    both = pairs(numbers * (int(labels.max(initial=0)) + 1) + labels)
    together, same = pairs(labels), pairs(numbers)
    return Agreement(both / together if together else 1.0, both / same if same else 1.0)


def _agglomerate(embeddings: np.ndarray, threshold: float) -> np.ndarray:
    from sklearn.cluster import AgglomerativeClustering

    if len(embeddings) == 1:
        return np.zeros(1, np.int64)
    if len(embeddings) > LARGEST_GROUP:
        raise ValueError(
            f"{len(embeddings)} pictures hang together at threshold {threshold:g}, at most {LARGEST_GROUP} can be clustered "
            "at once: lower the threshold, or cluster fewer pictures."
        )
    # scikit-learn stops BEFORE a merge at the threshold itself; "same" means at most the threshold.
    model = AgglomerativeClustering(
        n_clusters=None,
        metric="precomputed",
        linkage="average",
        distance_threshold=float(np.nextafter(threshold, np.inf)),
    )
    return model.fit_predict(squared_distances(*[embeddings.astype(np.float64)] * 2))


def _groups(embeddings: np.ndarray, threshold: float, rows: int = 1024) -> list[np.ndarray]:
    """Rows that chains of distances up to the threshold connect, found in little memory."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    total = len(embeddings)
    labels = np.arange(total)
    for start in range(0, total, rows):
        # A little beyond the threshold: one group too few costs time, one too many would change the result.
        near = squared_distances(embeddings[start : start + rows], embeddings[start:]) <= threshold + 1e-4
        i, j = np.nonzero(near)
        edges = coo_matrix((np.ones(len(i), np.int8), (labels[i + start], labels[j + start])), shape=(total, total))
        labels = connected_components(edges, directed=False)[1][labels]
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if total else []
