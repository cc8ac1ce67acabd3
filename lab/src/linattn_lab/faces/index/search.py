"""The nearest embeddings, exactly: over chunks of any size, candidates found by numpy or, in large indexes, by faiss."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...neighbours import k_nearest, smallest

FAISS_BEYOND = 50_000
# Candidates beyond k: float32 may swap near-equal distances, which are then computed again in float64.
SPARE = 8
UNIT_ROUNDOFF = 2.0**-24  # of float32


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N, M) squared distances of unit rows, from 0 to 4."""
    return np.clip(2 - 2 * (a @ b.T), 0, 4)


def nearest(
    queries: np.ndarray, chunks: Iterable[np.ndarray], k: int, *, by_faiss: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances (Q, k) and indices (Q, k) of the k rows nearest to each query, nearest first; ties by index.

    Args:
        queries: unit rows (Q, D) float32.
        chunks: unit rows float32 in portions; indices count through all of them. Fewer than k rows give fewer columns.
        by_faiss: faiss picks the candidates of a chunk; the results are the same.
    """
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}.")
    rows = torch.from_numpy(np.ascontiguousarray(queries, np.float32))
    portions = (torch.from_numpy(np.ascontiguousarray(chunk, np.float32)) for chunk in chunks)
    distances, indices = k_nearest(rows, portions, k, partial(_search, by_faiss=by_faiss))
    return distances.numpy().astype(np.float32), indices.numpy()


def _search(queries: Tensor, chunk: Tensor, k: int, *, by_faiss: bool) -> tuple[Tensor, Tensor]:
    """Squared distances (Q, keep) float64 and columns (Q, keep) of at least the k nearest rows, columns ascending."""
    keep = min(k + SPARE, len(chunk))
    rough, columns = _candidates(queries, chunk, keep, by_faiss=by_faiss)
    columns = columns.sort(dim=1).values
    distances = (queries[:, None].double() - chunk[columns]).square().sum(-1)
    # Where more rows are as near as the k-th than there are spare candidates, the nearest may not be among these: all
    # rows are then compared in float64. For unit rows |q|^2 + |c|^2 - 2 q.c is off by at most about 4 D roundoffs, the
    # difference of two such by twice as much.
    tolerance = 8 * (chunk.shape[1] + 4) * UNIT_ROUNDOFF
    undecided = (rough[:, -1] - rough[:, k - 1] <= tolerance) & (keep < len(chunk))
    for i in undecided.nonzero()[:, 0].tolist():
        every = (queries[i].double() - chunk).square().sum(-1)[None]
        columns[i] = smallest(every, keep)[0]
        distances[i] = every[0, columns[i]]
    return distances, columns


def _candidates(queries: Tensor, chunk: Tensor, keep: int, *, by_faiss: bool) -> tuple[Tensor, Tensor]:
    """Squared distances in float32 (Q, keep), ascending, up to a constant for each query, and their columns."""
    if by_faiss:
        import faiss

        found = faiss.knn(queries.numpy(), chunk.numpy(), keep, metric=faiss.METRIC_L2)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    nearest_first = (chunk.square().sum(1) - 2 * (queries @ chunk.T)).topk(keep, dim=1, largest=False)
    return nearest_first.values, nearest_first.indices
