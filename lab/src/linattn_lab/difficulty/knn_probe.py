"""A k-nearest-neighbour classifier: scikit-learn's KNeighborsClassifier, in bounded memory."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..neighbours import k_nearest, smallest

CHUNK = 2000  # queries, and references, whose distances are held at once: 32 MB


def vote(queries: Tensor, references: Iterable[Tensor], labels: Tensor, *, k: int = 30) -> Tensor:
    """Classes (Q,) of queries (Q, D) by the majority of their k nearest references in Euclidean distance.

    References arrive in portions (n, D) in the order of `labels` and are not kept, so that a layer with many features is
    held for the queries only. Distances are float64. Tied votes go to the smaller class, as in scikit-learn; a tie at the
    k-th distance goes to the earlier reference, where scikit-learn's choice depends on the state of its heap.
    """
    if not 1 <= k <= len(labels):
        raise ValueError(f"k must be 1 to the number of references, {len(labels)}; got {k}.")
    seen = 0

    def portions() -> Iterable[Tensor]:
        nonlocal seen
        for reference in references:
            for portion in reference.split(CHUNK):
                seen += len(portion)
                yield portion

    owners = k_nearest(queries, portions(), k, _search)[1]
    if seen != len(labels):
        raise ValueError(f"there are {seen} references and {len(labels)} labels.")
    votes = torch.zeros(len(queries), int(labels.max()) + 1)
    votes.scatter_add_(1, labels[owners], torch.ones(owners.shape))
    return votes.argmax(1)  # the first of the largest


def _search(queries: Tensor, portion: Tensor, k: int) -> tuple[Tensor, Tensor]:
    portion = _checked(portion)
    squares = portion.square().sum(1)
    found = []
    for part in queries.split(CHUNK):
        distances = (
            squares - 2 * _checked(part) @ portion.T
        )  # less the query's own square, which does not change the order
        columns = smallest(distances, k)
        found.append((distances.gather(1, columns), columns))
    return torch.cat([distances for distances, _ in found]), torch.cat([columns for _, columns in found])


def _checked(features: Tensor) -> Tensor:
    wide = features.double()
    if not torch.isfinite(wide).all():
        raise ValueError("features must be finite, got NaN or infinity: the network may have diverged.")
    return wide
