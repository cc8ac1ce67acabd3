"""The merging rule: slots that stand for many keys, and which of them are merged.

With a the mean query (the anchor), a slot for the keys J has the log-weight lw = log sum_J exp(a.y_j), and the means k and v
of its keys and values with the weights p_j = exp(a.y_j - lw). Its logit for a query x is lw + (x - a).k = x.k + bias: exact
for one key, first order around the mean query for many. Only the bias is stored; for a single key it is 0, whatever the anchor.
With a cap (`biases.py`), capped scores take the place of a.y_j, x.k and a.k.

Slots merge where that changes the output least. With the weight w that a slot receives, pooling the slots i and j errs by about

    w_i w_j / (w_i + w_j) |k_i - k_j|^2 (1 + |v_i - v_j|^2),

distances between keys in units of the spread of the queries, between values in units of their own. The weight is what the
slot received so far (`received.py`) plus what a Gaussian model of the queries expects, so that keys that no query asked for
yet are not lost, times the distance of its value from the mean: what is like the mean is cheap to lose. Heads with many slots
look for single keys, often for ones that no query asked for before. There every slot gets a weight beside its own, the same
for all, so that distances decide what merges unless a slot receives much more attention than most.

Shapes: entries (B, H, n, E) are keys beside values; bias (B, H, n) is -inf for an empty slot.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .biases import capped
from .constants import (
    CANDIDATES,
    EVEN_WEIGHT,
    LARGEST_LOG_WEIGHT,
    LEAST_VARIANCE,
    RIDGE,
    SEARCHED,
    SEARCHED_CANDIDATES,
    TINY,
)

# merge(entries, bias, rate, size, anchor, metric, alpha, cap), by either engine.
MergeFunction = Callable[
    [Tensor, Tensor, Tensor | None, int, Tensor, Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]
]


def query_moments(samples: Tensor) -> Tensor:
    """Sums (B, H, 2, D + 1) of queries [x, 1] (B, H, n, D + 1) and of their squares; rows of zeros count for nothing."""
    return torch.stack([samples.sum(2), samples.square().sum(2)], 2)


def anchor_and_metric(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (.., 1, D) of the queries in moments (.., 2, D + 1); 0 and 1 while there are none.

    A small number is added to the variances, so that distances count in directions without queries too.
    """
    dim = moments.shape[-1] - 1
    count = moments[..., :1, dim:]
    mean = moments[..., :1, :dim] / count.clamp_min(1)
    metric = (moments[..., 1:, :dim] / count.clamp_min(1) - mean.square()).clamp_min(0)
    ridge = RIDGE * metric.mean(-1, keepdim=True).clamp_min(LEAST_VARIANCE)
    return mean, metric + torch.where(count > 0, ridge, torch.ones_like(ridge))


def anchor_scores(entries: Tensor, anchor: Tensor, cap: float | None) -> Tensor:
    """(B, H, n): the scores of the keys in (B, H, n, E) for the anchor (B, H, 1, D)."""
    return capped((entries[..., : anchor.shape[-1]] @ anchor.mT).squeeze(-1), cap)


def merge(  # noqa: PLR0913
    entries: Tensor,
    bias: Tensor,
    rate: Tensor | None,
    size: int,
    anchor: Tensor,
    metric: Tensor,
    alpha: float,
    cap: float | None = None,
    stored: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges n slots into `size`, the cheapest pairs first; empty slots are dropped before any others are merged.

    rate: (B, H, n), the attention that each slot received per query so far, or None if that is not known. anchor, metric:
    (B, H, 1, D) both. cap: of the scores. stored: rounds slots as the state will store them. Also returns the new index
    (B, H, n) of every old slot.
    """
    log_weight = bias + anchor_scores(entries, anchor, cap)
    ranked = _rank(entries.detach(), log_weight.detach(), rate, metric, size)
    order = ranked.order
    entries, bias, log_weight = _take(entries, order), bias.gather(2, order), log_weight.gather(2, order)
    pairs = _choose_pairs(entries.detach(), ranked, size, metric, alpha)
    slots, slots_bias = _pool(entries, bias, log_weight, pairs, anchor, cap, stored)
    index = torch.empty_like(order).scatter_(2, order, _new_index(pairs, order.shape[2]))
    return slots, slots_bias, index


class _Ranking(NamedTuple):
    """Slots in the order of rising importance: importance (a logarithm) and indices of the slots, (B, H, n) both."""

    importance: Tensor
    order: Tensor


class _Pairs(NamedTuple):
    """Which slots are merged into which, as indices (B, H, .) in the order of rising importance.

    source: candidates that are merged into others. stay: candidates that are not. target: for each source, the index of its
    slot among what is left: the candidates that stay, then all slots that were no candidates.
    """

    source: Tensor
    stay: Tensor
    target: Tensor


@torch.no_grad()
def _rank(entries: Tensor, log_weight: Tensor, rate: Tensor | None, metric: Tensor, size: int) -> _Ranking:
    """By the expected weight times the distance of the value from the mean value, plus an even weight where `size` is large."""
    dim, live = metric.shape[-1], log_weight > -torch.inf
    key = _centred(entries[..., :dim], live)
    # log E_q[exp(q.k)] of Gaussian queries, up to a constant
    expected = (log_weight + (key.square() * metric).sum(-1) / 2).softmax(-1).nan_to_num()
    if rate is not None:
        total = rate.sum(-1, keepdim=True)
        expected = torch.where(total > 0, rate + expected * total, expected)
    mean = (expected.unsqueeze(2) @ entries[..., dim:]) / expected.sum(-1)[..., None, None].clamp_min(TINY)
    weight = expected * (entries[..., dim:] - mean).square().sum(-1).sqrt()
    if rate is not None and size >= SEARCHED:
        weight = weight + EVEN_WEIGHT * weight.sum(-1, keepdim=True) / live.sum(-1, keepdim=True).clamp_min(1)
    weight = weight / weight.amax(-1, keepdim=True).clamp_min(TINY)
    importance, order = weight.clamp_min(TINY).log().masked_fill(~live, -torch.inf).sort(dim=-1, stable=True)
    return _Ranking(importance, order)


@torch.no_grad()
def _choose_pairs(entries: Tensor, ranked: _Ranking, size: int, metric: Tensor, alpha: float) -> _Pairs:
    """Candidates are the least important slots. Each may be merged into any slot that is more important.

    The cost of a pair is |k_i - k_j|^2 (1 + |v_i - v_j|^2) u_i u_j / (u_i + u_j) with u = exp(alpha importance).
    """
    n, dim, importance = entries.shape[2], metric.shape[-1], ranked.importance
    candidates = min(n, max(2 * (n - size), SEARCHED_CANDIDATES if size >= SEARCHED else CANDIDATES))
    live = importance > -torch.inf
    key, value = (_centred(x, live) for x in (entries[..., :dim] * metric.sqrt(), entries[..., dim:]))
    inverse = (alpha * (importance[..., -1:] - importance).nan_to_num(nan=0.0)).clamp_max(LARGEST_LOG_WEIGHT).exp()
    scatter = (value.square().sum(-1) * live).sum(-1) / live.sum(-1).clamp_min(1)  # (B, H), half of the mean distance
    cost = _squared_distances(key, candidates)
    cost.mul_(_squared_distances(value, candidates).div_(2 * scatter.clamp_min(TINY)[..., None, None]).add_(1))
    cost.div_(inverse[..., :candidates].unsqueeze(-1) + inverse.unsqueeze(-2))
    no_more_important = torch.ones(candidates, n, dtype=torch.bool, device=key.device).tril()
    cheapest, target = cost.masked_fill_(no_more_important, torch.inf).min(-1)
    # Distances out of the range of floats: merged last, into the most important slot.
    overflow = ~(cheapest < torch.inf)
    target = target.masked_fill(overflow, n - 1)
    cheapest.masked_fill_(overflow, torch.finfo(cheapest.dtype).max)
    cheapest.masked_fill_(~live[..., :candidates], -1)  # empty slots go first
    cheapest[..., n - 1 :] = torch.inf  # the most important slot stays
    by_cost = cheapest.argsort(-1)
    source, stay = by_cost[..., : n - size], by_cost[..., n - size :].sort(-1).values
    # A slot whose target is merged too follows it.
    identity = torch.arange(n, device=key.device).expand(*key.shape[:2], n)
    root = identity.scatter(2, source, target.gather(2, source))
    for _ in range((n - size).bit_length()):
        root = root.gather(2, root)
    left = torch.cat([stay, identity[..., candidates:]], 2)
    rank = torch.empty_like(identity).scatter_(2, left, identity[..., :size])
    return _Pairs(source, stay, rank.gather(2, root.gather(2, source)))


def _squared_distances(x: Tensor, candidates: int) -> Tensor:
    """(B, H, candidates, n): between the first of (B, H, n, D) and all of them."""
    size, rows = x.square().sum(-1), x.flatten(0, 1)
    table = torch.baddbmm(size.flatten(0, 1).unsqueeze(-2), rows[:, :candidates], rows.mT, alpha=-2)
    return table.unflatten(0, x.shape[:2]).add_(size[..., :candidates].unsqueeze(-1)).clamp_min_(0)


def _pool(
    entries: Tensor,
    bias: Tensor,
    log_weight: Tensor,
    pairs: _Pairs,
    anchor: Tensor,
    cap: float | None,
    stored: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The merged slots and their biases: weighted means, relative to the heaviest member of each new slot."""
    source, stay, target = pairs
    candidates = stay.shape[2] + source.shape[2]
    left = torch.cat([_take(entries, stay), entries[:, :, candidates:]], 2)
    left_bias, left_weight = (torch.cat([x.gather(2, stay), x[..., candidates:]], 2) for x in (bias, log_weight))
    source_weight = log_weight.gather(2, source)
    top = left_weight.detach().scatter_reduce(2, target, source_weight.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    share, added = (left_weight - top).exp(), (source_weight - top.gather(2, target)).exp()
    total = share.scatter_add(2, target, added)
    # A slot that nothing was merged into keeps its bits: a single key stays exact for ever.
    same = total.detach() == share.detach()
    total = total.masked_fill(same, 1)
    moved = _take(entries, source) * added.unsqueeze(-1)
    pooled = left * share.masked_fill(same, 1).unsqueeze(-1)
    pooled = pooled.scatter_add(2, target.unsqueeze(-1).expand_as(moved), moved) / total.unsqueeze(-1)
    pooled = pooled if stored is None else stored(pooled)
    new_bias = total.log() + top - anchor_scores(pooled, anchor, cap)
    return pooled, torch.where(same, left_bias, new_bias)


def _new_index(pairs: _Pairs, total: int) -> Tensor:
    """(B, H, n): where the slots in the order of rising importance are after the merge."""
    source, stay, target = pairs
    count = torch.arange(total, device=stay.device).expand(*stay.shape[:2], -1)
    kept, candidates = stay.shape[2], stay.shape[2] + source.shape[2]
    index = torch.cat([count[..., :candidates], count[..., kept : kept + total - candidates]], 2)
    return index.scatter(2, stay, count[..., :kept]).scatter(2, source, target)


def _centred(x: Tensor, live: Tensor) -> Tensor:
    """Keys or values (B, H, n, D) about the mean of those that are not empty; empty ones must be 0."""
    return x - x.sum(2, keepdim=True) / live.sum(-1)[..., None, None].clamp_min(1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Slots (B, H, n, E) by index (B, H, m)."""
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
