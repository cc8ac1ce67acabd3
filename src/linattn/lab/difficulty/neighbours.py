"""The class that most of the k nearest neighbours have: scikit-learn's KNeighborsClassifier, in bounded memory."""

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 2000  # queries, and references, whose distances are held at once: 32 MB


def vote(queries: Tensor, references: Iterable[Tensor], labels: Tensor, *, k: int = 30) -> Tensor:
    """Classes (Q,) of queries (Q, D) by the majority of their k nearest references in Euclidean distance.

    References come in portions (n, D) in the order of `labels`, and none is kept: a layer of many features is held for the
    queries alone.
    Distances are formed in float64. Where votes tie the smaller class wins, as in scikit-learn. Where the k-th distance ties
    the earlier reference counts; scikit-learn leaves that to the order in which its heap happens to stand.
    """
    if not 1 <= k <= len(labels):
        raise ValueError(f"k must be 1 to the number of references, {len(labels)}; got {k}.")
    nearest = torch.full((len(queries), k), torch.inf, dtype=torch.float64)  # distances so far, in order of reference
    owners = torch.zeros((len(queries), k), dtype=torch.long)  # and whose they are
    seen = 0
    for whole in references:
        for portion in whole.split(CHUNK):
            portion = _checked(portion)
            squares = portion.square().sum(1)
            places = torch.arange(seen, seen + len(portion))
            seen += len(portion)
            for part in torch.arange(len(queries)).split(CHUNK):
                # The query's own square is left out: it orders nothing.
                distances = torch.cat([nearest[part], squares - 2 * _checked(queries[part]) @ portion.T], 1)
                chosen = smallest(distances, k)
                nearest[part] = distances.gather(1, chosen)
                owners[part] = torch.cat([owners[part], places.expand(len(part), -1)], 1).gather(1, chosen)
    if seen != len(labels):
        raise ValueError(f"there are {seen} references and {len(labels)} labels.")
    votes = torch.zeros(len(queries), int(labels.max()) + 1)
    votes.scatter_add_(1, labels[owners], torch.ones(owners.shape))
    return votes.argmax(1)  # the first of the largest


def smallest(values: Tensor, k: int) -> Tensor:
    """Places (Q, k) of the k smallest values of each row of (Q, N), in order of place; of equal values the first ones."""
    edge = values.topk(k, dim=1, largest=False).values[:, -1:]
    below, level = values < edge, values == edge
    room = k - below.sum(1, keepdim=True)
    chosen = below | (level & (level.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].view(-1, k)


def _checked(features: Tensor) -> Tensor:
    wide = features.double()
    if not torch.isfinite(wide).all():
        raise ValueError("features must be finite, got NaN or infinity: the network may have diverged.")
    return wide
