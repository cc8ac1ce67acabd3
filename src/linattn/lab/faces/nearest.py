"""The nearest embeddings, exactly: over chunks of any size in little memory, by numpy or, where there are many, by faiss."""

from collections.abc import Iterable

import numpy as np

FAISS_BEYOND = 50_000
# Candidates kept beyond k: products in float32 order near-equal distances by chance, the distances computed anew do not.
SPARE = 8


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N, M) squared distances of unit rows, from 0 to 4."""
    return np.clip(2 - 2 * (a @ b.T), 0, 4)


def nearest(
    queries: np.ndarray, chunks: Iterable[np.ndarray], k: int, *, by_faiss: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances (Q, k) and places (Q, k) of the k rows nearest to each query, nearest first.

    Rows that are equally near come in the order of their places. With fewer than k rows there are fewer columns.

    Args:
        queries: unit rows (Q, D) float32.
        chunks: unit rows float32 in portions; places count through all of them.
        by_faiss: faiss picks the candidates of a chunk; the results are the same.
    """
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}.")
    queries = np.ascontiguousarray(queries, np.float32)
    distances = np.empty((len(queries), 0))
    places = np.empty((len(queries), 0), np.int64)
    start = 0
    for chunk in chunks:
        keep = min(k + SPARE, len(chunk))
        if keep:
            columns = _by_faiss(queries, chunk, keep) if by_faiss else _by_numpy(queries, chunk, keep)
            exact = ((queries[:, None].astype(np.float64) - chunk[columns]) ** 2).sum(-1)  # (Q, keep)
            distances = np.concatenate([distances, exact], 1)
            places = np.concatenate([places, columns + start], 1)
            order = np.lexsort((places, distances))[:, : k + SPARE]
            distances, places = np.take_along_axis(distances, order, 1), np.take_along_axis(places, order, 1)
        start += len(chunk)
    return distances[:, :k].astype(np.float32), places[:, :k]


def _by_numpy(queries: np.ndarray, chunk: np.ndarray, keep: int) -> np.ndarray:
    products = queries @ chunk.T
    return np.argpartition(-products, keep - 1, axis=1)[:, :keep]


def _by_faiss(queries: np.ndarray, chunk: np.ndarray, keep: int) -> np.ndarray:
    import faiss

    return faiss.knn(queries, np.ascontiguousarray(chunk), keep, metric=faiss.METRIC_INNER_PRODUCT)[1]
