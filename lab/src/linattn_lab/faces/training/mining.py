"""Triplets: an anchor, another image of the person (positive) and one of someone else (negative), chosen in a batch.

The loss is max(0, d(a, p) - d(a, n) + margin) with d the SQUARED distance of unit vectors. Where each pair of anchor and
positive has one negative (semihard, random), it is the mean over all of them, else over those above zero. Miners, loss
and sampler are those of pytorch-metric-learning.
"""

from collections.abc import Callable

import numpy as np
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchEasyHardMiner, TripletMarginMiner
from pytorch_metric_learning.reducers import MeanReducer
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from torch import Tensor

MARGIN = 0.2
FARTHEST = 4.0  # squared distance of two unit vectors
KINDS = {
    "semihard": "for every pair of anchor and positive the nearest negative with d(a,n) > d(a,p)",
    "semihard-all": "all with d(a,p) < d(a,n) <= d(a,p) + margin",
    "hard": "the nearest negative for every pair of anchor and positive",
    "all": "all that have a loss: d(a,n) <= d(a,p) + margin",
    "random": "one negative by lot for each of as many random pairs as there are of anchor and positive",
    "random-violating": "those of them that have a loss",
}
Triplets = tuple[Tensor, Tensor, Tensor]


class TripletLoss:
    """Mean loss of the triplets that a kind of mining finds in a batch; zero (with a gradient) where it finds none.

    Args:
        kind: one of KINDS.
        margin: of squared distances.
    """

    def __init__(self, kind: str = "semihard", margin: float = MARGIN):
        if kind not in KINDS:
            raise ValueError(f"no mining {kind!r}: there are {', '.join(KINDS)}.")
        self.kind, self.margin = kind, margin
        distance = LpDistance(normalize_embeddings=False, power=2)
        reducer = MeanReducer() if kind in ("semihard", "random") else None  # None: the mean over those above zero
        self._loss = TripletMarginLoss(margin, distance=distance, reducer=reducer)
        self._miner = None
        if kind == "hard":
            self._miner = BatchEasyHardMiner(pos_strategy="all", neg_strategy="hard", distance=distance)
        elif kind == "semihard":
            self._miner = TripletMarginMiner(FARTHEST, "semihard", distance=distance)
        elif not kind.startswith("random"):
            self._miner = TripletMarginMiner(margin, kind.removesuffix("-all"), distance=distance)

    def mine(self, vectors: Tensor, labels: Tensor) -> Triplets:
        """Anchors, positives and negatives as numbers of rows."""
        if self._miner is None:
            per_anchor = max(1, round(float((labels[:, None] == labels).sum(1).float().mean())) - 1)
            return loss_and_miner_utils.get_random_triplet_indices(labels, t_per_anchor=per_anchor)
        found = loss_and_miner_utils.convert_to_triplets(self._miner(vectors, labels), labels)
        return _nearest(vectors, found) if self.kind == "semihard" else found

    def __call__(self, vectors: Tensor, labels: Tensor) -> Tensor:
        return self._loss(vectors, labels, self.mine(vectors, labels))


@torch.no_grad()
def _nearest(vectors: Tensor, triplets: Triplets) -> Triplets:
    """Of the triplets with the same anchor and positive the one with the nearest negative."""
    anchor, positive, negative = triplets
    by_distance = torch.cdist(vectors, vectors)[anchor, negative].argsort()
    pair = (anchor * len(vectors) + positive)[by_distance]
    pair, by_pair = pair.sort(stable=True)
    first = torch.ones_like(pair, dtype=torch.bool)
    first[1:] = pair[1:] != pair[:-1]
    chosen = by_distance[by_pair[first]]
    return anchor[chosen], positive[chosen], negative[chosen]


def balanced_order(
    labels: Tensor, people: int, pictures: int, batches: int, seed: int
) -> Callable[[int], list[list[int]]]:
    """The trainer's order: every batch has `people` people with `pictures` images each, a function of seed and epoch."""
    present = len(torch.unique(labels))
    if present < 2:
        raise ValueError(f"triplets need two people or more, got {present}.")
    people = min(people, present)

    def order(epoch: int) -> list[list[int]]:
        width = people * pictures
        before = common_functions.NUMPY_RANDOM
        common_functions.NUMPY_RANDOM = np.random.RandomState((seed * 1_000_003 + epoch) % 2**32)
        try:
            flat = [int(i) for i in MPerClassSampler(labels, pictures, width, batches * width)]
        finally:
            common_functions.NUMPY_RANDOM = before
        return [flat[i : i + width] for i in range(0, len(flat), width)]

    return order
