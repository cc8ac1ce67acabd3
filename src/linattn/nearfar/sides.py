"""Near/far attention without a causal mask, with a table of position biases: far keys on the left and on the right of a block.

Far keys on either side have one bias each, the ends of the table. A slot may hold keys of both sides, so every block sees it
twice: with the share of its keys that are far on the left and their mean value, and likewise on the right. Near keys are in
neither.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .biases import Scores
from .constants import HIDDEN

LEAST_SHARE = 1e-9  # of a slot on one side; sums in float64 round less than that


class FarSides:
    """The shares and values of the keys that are far from each block, in their slots.

    Shapes: slots (B, H, size, E); slot and log_share (B, H, N), of every key; values (B, H, N, M).
    """

    def __init__(self, size: int, slot: Tensor, log_share: Tensor, value: Tensor):
        share = log_share.double().exp().unsqueeze(-1)
        self._slot, self._size = slot, size
        self._weighted = torch.cat([share, share * value.double()], -1)  # (B, H, N, 1 + M)

    def by_block(self, block: int, window: int, blocks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each block, log-shares (B, H, 2 size) and mean values (B, H, 2 size, M): left, then right."""
        N = self._slot.shape[2]
        left, right, begin, end = self._sum(0, 0), self._sum(0, N), 0, 0
        for i in range(blocks):
            new_begin, new_end = max(0, min(N, i * block - window)), min(N, (i + 1) * block + window)
            left, begin = left + self._sum(begin, new_begin), new_begin
            right, end = right - self._sum(end, new_end), new_end
            both = torch.cat([left, right], 2)
            share, total = both[..., 0], both[..., 1:]
            empty = share < LEAST_SHARE
            share = share.masked_fill(empty, 1)
            mean = (total / share.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0)
            yield share.log().masked_fill(empty, HIDDEN), mean

    def _sum(self, start: int, stop: int) -> Tensor:
        """Over the keys from `start` to `stop`, in their slots: (B, H, size, 1 + M)."""
        weighted = self._weighted[:, :, start:stop]
        index = self._slot[:, :, start:stop].unsqueeze(-1).expand_as(weighted)
        return weighted.new_zeros(*weighted.shape[:2], self._size, weighted.shape[3]).scatter_add(2, index, weighted)


def attend_both_sides(
    scores: Scores, slot_logits: Tensor, near_logits: Tensor, near_value: Tensor, sides: tuple[Tensor, Tensor]
) -> Tensor:
    """Softmax over near keys (B, H, 1, r, k) and slots (B, H, 1, r, size), seen from both sides: (B, H, 1, r, M).

    sides: of the one block that the r = G * block queries are in.
    """
    assert scores.table is not None
    G = scores.table.shape[1]
    log_share, value = (x.to(near_logits.dtype).unsqueeze(2) for x in sides)
    rows = slot_logits.shape[3] // G
    ends = scores.table[..., [0, -1]].repeat_interleave(rows, 1)  # (H, r, 2)
    ends = ends[None, :, None].repeat_interleave(slot_logits.shape[4], -1)  # (1, H, 1, r, 2 size)
    far_logits = slot_logits.repeat(1, 1, 1, 1, 2) + ends + log_share.unsqueeze(-2)
    weights = torch.cat([near_logits, far_logits], -1).softmax(-1)
    near = near_logits.shape[-1]
    return weights[..., :near] @ near_value + weights[..., near:] @ value
