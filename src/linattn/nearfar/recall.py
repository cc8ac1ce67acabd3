"""Recall: heads that copy keep their far tokens, and every query attends exactly to the most promising of them.

Far tokens are stored in blocks of a few. The score of a block for a query x is x.mean + 2 sqrt(x^2.var) of its keys, about the
largest logit that one of them may have. Each token chooses for itself; the query heads of a kv head choose together. Keys
that are recalled leave the slots that they were merged into, by the share that the slot has of each: with Z the
denominator without recall,

    Z' = Z + sum_j (exp(x.y_j) - share_j exp(logit of j's slot)),

and likewise for the numerator. So recall corrects an output that was computed without it. A chosen block none of whose keys
has a weight exp(x.y_j) / Z of at least LEAST_WEIGHT is not recalled after all, unless there are no more blocks than a token
may recall.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from .biases import Scores, capped
from .constants import HIDDEN, LEAST_WEIGHT
from .far_cache import FarCache
from .merge import anchor_scores
from .state import HeadGroup

DEVIATIONS = 2.0  # standard deviations above the mean at which the best key of a block is expected
QUERIES_AT_ONCE = 64  # queries that share the blocks they gather


class FarCacheWriter:
    """Writes the tokens of one call to a far cache, block of merging by block of merging."""

    def __init__(self, cache: FarCache, arriving: Tensor, position: Tensor, fresh: Tensor, window: int, dim: int):
        """arriving: (B, H, blocks * block, E), tokens at position (B, blocks, block), of which the `fresh` ones are new."""
        self.fresh = fresh
        self.cell = position + window % position.shape[-1]  # (B, blocks, block)
        ends = (self.cell + 1).masked_fill(~fresh, 0)
        self.ends = ends.amax((0, 2)).cummax(0).values.clamp_min(cache.log_share.shape[2]).tolist()
        self.cache = cache
        if bool(fresh.any()):
            self.cache = cache.extended(arriving, self.cell.flatten(1), fresh.flatten(1), self.ends[-1], dim)

    def add_block(self, i: int, first_slot: int, moved: tuple[Tensor, Tensor] | None) -> FarCache:
        """The cache after block i, whose tokens became slots from `first_slot` on; then slots were `moved` (`moved_slots`)."""
        cache, end = self.cache, self.ends[i]
        H, have = cache.log_share.shape[1:]
        spare, fresh = end - have, self.fresh[:, i]
        # Tokens that are not new are written behind the end, and cut off again.
        index = self.cell[:, i].masked_fill(~fresh, end).unsqueeze(1).expand(-1, H, -1)
        arrived = torch.arange(first_slot, first_slot + index.shape[2], device=index.device).expand_as(index)
        slot = torch.nn.functional.pad(cache.slot, (0, spare + 1)).scatter(2, index, arrived)[..., :end]
        share = torch.nn.functional.pad(cache.log_share, (0, spare + 1), value=-torch.inf)
        share = share.scatter(2, index, share.new_zeros(()).expand(index.shape))[..., :end]
        if moved is not None:
            share = share + moved[1].gather(2, slot)
            slot = moved[0].gather(2, slot)
        self.cache = replace(cache, slot=slot, log_share=share)
        return self.current()

    def current(self) -> FarCache:
        """What was merged so far."""
        cache = self.cache
        end = cache.log_share.shape[2]
        return replace(cache, entries=cache.entries[:, :, :end], bounds=cache.bounds[:, :, : end // cache.unit])


def moved_slots(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], index: Tensor, anchor: Tensor, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Where each slot went in a merge, and the log of its share there: (B, H, n) both.

    before, after: entries (B, H, n, E) and biases. The weight of a slot is exp(bias + its score for the anchor), and
    merging adds weights.
    """
    old, new = (bias + anchor_scores(entries, anchor, cap) for entries, bias in (before, after))
    change = old - new.gather(2, index)
    return index, change.masked_fill(old == -torch.inf, 0)


def correct(out: Tensor, log_denominator: Tensor, query: Tensor, group: HeadGroup, cache: FarCache) -> Tensor:
    """Output (B, H, G, L, M) as if the best blocks had never been merged, and were attended to exactly.

    log_denominator: (B, H, G, L) or flat (B, H, G L), of the output so far.
    """
    B, H, G, L, D = query.shape
    log_denominator = log_denominator.reshape(B, H, G, L)
    if L > QUERIES_AT_ONCE:
        parts = zip(*(x.split(QUERIES_AT_ONCE, 3) for x in (out, log_denominator, query)), strict=True)
        return torch.cat([correct(o, z, x, group, cache) for o, z, x in parts], 3)
    if cache.bounds.shape[2] == 0 or L == 0:
        return out
    with torch.no_grad():
        chosen = _choose_blocks(query, log_denominator, cache, group.scores)  # (B, H, L, n)
        needed = chosen.any(2)
        count = int(needed.sum(-1).max())
        index = needed.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]  # (B, H, u)
        seen = chosen.gather(3, index.unsqueeze(2).expand(-1, -1, L, -1)).repeat_interleave(cache.unit, -1)
    if count == 0:
        return out
    tokens, slot, log_share = cache.take(index, out.dtype)
    x = query.flatten(2, 3)
    hidden = ~(seen & (log_share > -torch.inf).unsqueeze(2)).repeat(1, 1, G, 1)  # (B, H, G L, tokens)
    log_z = log_denominator.flatten(2).unsqueeze(-1)
    logits = (group.scores.logits(x, tokens[..., :D]) - log_z).masked_fill(hidden, HIDDEN)
    light = _light(logits.detach(), cache, G)
    hidden, logits = hidden | light, logits.masked_fill(light, HIDDEN)
    top = logits.detach().amax(-1, keepdim=True).clamp_min(0)
    gain = (logits - top).exp()
    if group.slots.shape[2] > 0:
        slot_logits = group.scores.logits(x, group.slots[..., :D], group.bias) - log_z
        pooled = slot_logits.gather(3, slot.unsqueeze(2).expand(-1, -1, G * L, -1)) + log_share.unsqueeze(2)
        gain = gain - (pooled - top).masked_fill(hidden, HIDDEN).exp()
    rest = (-top).exp()
    total = rest + gain.sum(-1, keepdim=True)
    return ((out.flatten(2, 3) * rest + gain @ tokens[..., D:]) / total).reshape(out.shape)


def _light(logits: Tensor, cache: FarCache, groups: int) -> Tensor:
    """(B, H, G L, tokens): which keys are in a block that has no weight for its token. logits: relative to the denominators."""
    blocks = logits.unflatten(3, (-1, cache.unit)).amax(-1).unflatten(2, (groups, -1)).amax(2)  # (B, H, L, u)
    more = _alive(cache).sum(-1) > cache.blocks  # (B, H, 1)
    light = (blocks < math.log(LEAST_WEIGHT)) & more.unsqueeze(-1)
    return light.repeat(1, 1, groups, 1).repeat_interleave(cache.unit, -1)


def _alive(cache: FarCache) -> Tensor:
    """(B, H, 1, n): which blocks have a token."""
    return (cache.log_share > -torch.inf).unflatten(2, (-1, cache.unit)).any(-1).unsqueeze(2)


def _choose_blocks(query: Tensor, log_denominator: Tensor, cache: FarCache, scores: Scores) -> Tensor:
    """(B, H, L, n): which blocks each token recalls, by the query head of its group that would gain most."""
    alive = _alive(cache)
    G, L, D = query.shape[2:]
    if cache.blocks >= alive.shape[-1]:
        return alive.expand(-1, -1, L, -1)
    x, (mean, var) = query.flatten(2, 3), cache.bounds_of_keys(D, query.dtype)
    score = x @ mean.mT + DEVIATIONS * (x.square() @ var.mT).sqrt()
    score = capped(score, scores.cap)
    if scores.table is not None:
        score = score + scores.by_position(x, mean)
    score = (score.unflatten(2, (G, L)) - log_denominator.unsqueeze(-1)).amax(2).masked_fill(~alive, -torch.inf)
    best = score.topk(cache.blocks, -1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(3, best, True) & alive
