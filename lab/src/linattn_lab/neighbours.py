"""Exact k nearest neighbours over references that arrive in portions, in bounded memory.

How distances within a portion are computed is the caller's: the difficulty lab measures wide activations in float64, the
face index searches unit vectors with numpy or faiss.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# (queries (Q, D), portion (n, D), k) -> distances (Q, m) and columns (Q, m) of at least the k nearest, columns ascending.
Search = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def k_nearest(queries: Tensor, portions: Iterable[Tensor], k: int, search: Search) -> tuple[Tensor, Tensor]:
    """Distances (Q, k) float64 and indices (Q, k) of the k nearest references, nearest first; ties by smaller index.

    Args:
        queries: (Q, D).
        portions: references (n, D); indices count through all of them. Fewer than k references give fewer columns.
        search: the k nearest within one portion.
    """
    distances = torch.empty(len(queries), 0, dtype=torch.float64)
    indices = torch.empty(len(queries), 0, dtype=torch.long)
    seen = 0
    for portion in portions:
        if not len(portion):
            continue
        found, columns = search(queries, portion, min(k, len(portion)))
        distances, indices = torch.cat([distances, found], 1), torch.cat([indices, columns + seen], 1)
        chosen = smallest(distances, min(k, distances.shape[1]))
        distances, indices = distances.gather(1, chosen), indices.gather(1, chosen)
        seen += len(portion)
    distances, order = distances.sort(dim=1, stable=True)  # stable: indices are ascending so far
    return distances, indices.gather(1, order)


def smallest(values: Tensor, k: int) -> Tensor:
    """Columns (Q, k) of the k smallest values in each row of (Q, N), ascending; the first ones among equal values."""
    edge = values.topk(k, dim=1, largest=False).values[:, -1:]
    below, level = values < edge, values == edge
    room = k - below.sum(1, keepdim=True)
    chosen = below | (level & (level.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].view(-1, k)
