"""Recall: heads that copy keep their far tokens, and every query attends to the most promising of them exactly.

Far tokens lie in blocks of a few. A block is promising for a query x by x.mean + 2 sqrt(x^2.var) of its keys, about the largest
logit that one of them may have; the heads of a group choose together, each token for itself. Keys that are chosen leave
the slots they went into, by the share that the slot keeps of each: with Z the denominator without recall,

    Z' = Z + sum_j (exp(x.y_j) - share_j exp(logit of j's slot)),

and likewise for the numerator. So recall corrects an output that was computed without it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .kept import Kept

SPREAD = 2.0  # standard deviations above the mean at which the best of a block's keys is expected
HIDDEN = -1e30  # as in step.py
PIECE = 64  # queries that share the blocks which they gather


class Trail:
    """Where far tokens go during one call. Blocks of merging are entered one after the other."""

    def __init__(self, kept: Kept, arriving: Tensor, position: Tensor, fresh: Tensor, window: int, dim: int):
        """arriving (B, H, blocks * block, E) at position (B, blocks, block), of which those that are `fresh` are new."""
        block = position.shape[-1]
        self.fresh = fresh
        self.cell = position + window % block  # (B, blocks, block)
        ends = (self.cell + 1).masked_fill(~fresh, 0)
        self.ends = ends.amax((0, 2)).cummax(0).values.clamp_min(kept.share.shape[2]).tolist()
        self.kept = kept
        if bool(fresh.any()):
            self.kept = kept.extended(arriving, self.cell.flatten(1), fresh.flatten(1), self.ends[-1], dim)

    def enter(self, i: int, first: int, moved: tuple[Tensor, Tensor] | None) -> None:
        """Block i is merged: its tokens came as slots from `first` on, and all slots `moved` (see `follow`)."""
        kept, end = self.kept, self.ends[i]
        H, have = kept.share.shape[1:]
        spare, fresh = end - have, self.fresh[:, i]
        index = self.cell[:, i].masked_fill(~fresh, end)  # the others go into a cell that is cut off again
        index = index.unsqueeze(1).expand(-1, H, -1)
        arrived = torch.arange(first, first + index.shape[2], device=index.device).expand_as(index)
        place = torch.nn.functional.pad(kept.place, (0, spare + 1)).scatter(2, index, arrived)[..., :end]
        share = torch.nn.functional.pad(kept.share, (0, spare + 1), value=-torch.inf)
        share = share.scatter(2, index, share.new_zeros(()).expand(index.shape))[..., :end]
        if moved is not None:
            share = share + moved[1].gather(2, place)
            place = moved[0].gather(2, place)
        self.kept = replace(kept, place=place, share=share)

    def now(self) -> Kept:
        """What was merged so far."""
        kept = self.kept
        end = kept.share.shape[2]
        return replace(kept, entries=kept.entries[:, :, :end], bounds=kept.bounds[:, :, : end // kept.unit])


def follow(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], place: Tensor, anchor: Tensor
) -> tuple[Tensor, Tensor]:
    """Where each slot went in a merge, and the log of the share it has there: (B, H, n) both.

    before, after: entries (B, H, n, E) and biases. The weight of a slot is bias + anchor.k, and merging adds weights.
    """
    dim = anchor.shape[-1]
    old, new = (bias + (entries[..., :dim] @ anchor.mT).squeeze(-1) for entries, bias in (before, after))
    change = old - new.gather(2, place)
    return place, change.masked_fill(old == -torch.inf, 0)


def correct(out: Tensor, level: Tensor, query: Tensor, slots: Tensor, bias: Tensor, kept: Kept) -> Tensor:
    """Output (B, H, G, L, M) as if the best blocks had been kept out of the slots (B, H, c, E) and attended to exactly.

    level: (B, H, G, L) or flat (B, H, G L), log of the denominator that the output was divided by.
    """
    B, H, G, L, D = query.shape
    level = level.reshape(B, H, G, L)
    if L > PIECE:
        pieces = zip(out.split(PIECE, 3), level.split(PIECE, 3), query.split(PIECE, 3))
        return torch.cat([correct(o, z, x, slots, bias, kept) for o, z, x in pieces], 3)
    if kept.bounds.shape[2] == 0 or L == 0:
        return out
    unit = kept.unit
    with torch.no_grad():
        chosen = _choose(query, level, kept)  # (B, H, L, n)
        wanted = chosen.any(2)
        count = int(wanted.sum(-1).max())
        index = wanted.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]  # (B, H, u)
        seen = chosen.gather(3, index.unsqueeze(2).expand(-1, -1, L, -1)).repeat_interleave(unit, -1)
    if count == 0:
        return out
    tokens, place, share = kept.take(index, out)
    x = query.flatten(2, 3)
    hidden = ~(seen & (share > -torch.inf).unsqueeze(2)).repeat(1, 1, G, 1)  # (B, H, G L, cells)
    level = level.flatten(2).unsqueeze(-1)
    logits = (x @ tokens[..., :D].mT - level).masked_fill(hidden, HIDDEN)
    top = logits.detach().amax(-1, keepdim=True).clamp_min(0)
    gain = (logits - top).exp()
    if slots.shape[2] > 0:
        pooled = x @ slots[..., :D].mT + bias.unsqueeze(2) - level
        stood = pooled.gather(3, place.unsqueeze(2).expand(-1, -1, G * L, -1)) + share.unsqueeze(2)
        gain = gain - (stood - top).masked_fill(hidden, HIDDEN).exp()
    rest = (-top).exp()
    total = rest + gain.sum(-1, keepdim=True)
    return ((out.flatten(2, 3) * rest + gain @ tokens[..., D:]) / total).unflatten(2, (G, L))


def _choose(query: Tensor, level: Tensor, kept: Kept) -> Tensor:
    """(B, H, L, n): which blocks each token recalls, by the head of its group that would gain most."""
    alive = (kept.share > -torch.inf).unflatten(2, (-1, kept.unit)).any(-1).unsqueeze(2)  # (B, H, 1, n)
    G, L, D = query.shape[2:]
    n = alive.shape[-1]
    if kept.blocks >= n:
        return alive.expand(-1, -1, L, -1)
    x, bounds = query.flatten(2, 3), kept.bounds.to(query.dtype)
    score = x @ bounds[..., :D].mT + SPREAD * (x.square() @ bounds[..., D : 2 * D].mT).sqrt()
    score = (score.unflatten(2, (G, L)) - level.unsqueeze(-1)).amax(2).masked_fill(~alive, -torch.inf)
    best = score.topk(kept.blocks, -1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(3, best, True) & alive
