"""The merging rule: slots that stand for many keys, and which of them are merged.

With a the mean query (the anchor), a slot for the keys J has the log-weight lw = log sum_J exp(a.y_j), and the means k and v
of its keys and values with the weights p_j = exp(a.y_j - lw). Its logit for a query x is lw + (x - a).k = x.k + bias: exact
for one key, first order around the mean query for many. Only the bias is stored; for a single key it is 0, whatever the anchor.

Shapes: entries (B, H, n, E) are keys beside values; bias (B, H, n) is -inf for an empty slot.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .constants import CANDIDATES, LARGEST_LOG_WEIGHT, LEAST_VARIANCE, RIDGE

# merge(entries, bias, size, anchor, metric, alpha), by either engine.
MergeFunction = Callable[[Tensor, Tensor, int, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def anchor_and_metric(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (B, H, 1, D) and covariance (B, H, D, D) of the queries seen; the identity while there are none.

    A small multiple of the identity is added, so that distances count in directions without queries too.
    """
    dim = moments.shape[-1] - 1
    count = moments[..., dim:, dim:]  # (B, H, 1, 1)
    mean = moments[..., dim:, :dim] / count.clamp_min(1)
    metric = moments[..., :dim, :dim] / count.clamp_min(1) - mean.mT @ mean
    ridge = RIDGE * metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(LEAST_VARIANCE)
    ridge = torch.where(count > 0, ridge, torch.ones_like(ridge))
    return mean, metric + ridge * torch.eye(dim, dtype=metric.dtype, device=metric.device)


def merge(
    entries: Tensor, bias: Tensor, size: int, anchor: Tensor, metric: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges n slots into `size`, the cheapest pairs first; empty slots are dropped before any others are merged.

    Also returns the new index (B, H, n) of every old slot.
    """
    dim = metric.shape[-1]
    log_weight = bias + (entries[..., :dim] @ anchor.mT).squeeze(-1)
    ranked = _rank(entries.detach()[..., :dim], log_weight.detach(), metric)
    order = ranked.order
    entries, bias, log_weight = _take(entries, order), bias.gather(2, order), log_weight.gather(2, order)
    pairs = _choose_pairs(entries.detach()[..., :dim], ranked, size, metric, alpha)
    slots, slots_bias = _pool(entries, bias, log_weight, pairs, anchor)
    index = torch.empty_like(order).scatter_(2, order, _new_index(pairs, order.shape[2]))
    return slots, slots_bias, index


class _Ranking(NamedTuple):
    """Slots in the order of rising importance, (B, H, n) each.

    importance: log E_q[exp(q.k)] under a Gaussian model of the queries, up to a constant. spread: squared length of the key
    about the mean key, in the metric of the queries. order: indices of the slots.
    """

    importance: Tensor
    spread: Tensor
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
def _rank(key: Tensor, log_weight: Tensor, metric: Tensor) -> _Ranking:
    key = _centred(key, log_weight)
    spread = ((key @ metric) * key).sum(-1)
    importance, order = (log_weight + spread / 2).sort(-1)
    return _Ranking(importance, spread.gather(2, order), order)


@torch.no_grad()
def _choose_pairs(key: Tensor, ranked: _Ranking, size: int, metric: Tensor, alpha: float) -> _Pairs:
    """Candidates are the least important slots. Each may be merged into any slot that is more important.

    The cost of a pair is its squared distance in the metric of the queries, times u_i u_j / (u_i + u_j) with
    u = exp(alpha importance).
    """
    n, importance, spread = key.shape[2], ranked.importance, ranked.spread
    candidates = min(n, max(2 * (n - size), CANDIDATES))
    key = _centred(key, importance)
    projected = key[:, :, :candidates] @ metric
    inverse = (alpha * (importance[..., -1:] - importance).nan_to_num(nan=0.0)).clamp_max(LARGEST_LOG_WEIGHT).exp()
    cost = torch.baddbmm(spread.flatten(0, 1).unsqueeze(-2), projected.flatten(0, 1), key.flatten(0, 1).mT, alpha=-2)
    cost = cost.reshape(*key.shape[:2], candidates, n)
    cost.add_(spread[..., :candidates].unsqueeze(-1)).clamp_min_(0)
    cost.div_(inverse[..., :candidates].unsqueeze(-1) + inverse.unsqueeze(-2))
    no_more_important = torch.ones(candidates, n, dtype=torch.bool, device=key.device).tril()
    cheapest, target = cost.masked_fill_(no_more_important, torch.inf).min(-1)
    overflow = ~(
        cheapest < torch.inf
    )  # distances out of the range of floats: merged last, into the most important slot
    target = target.masked_fill(overflow, n - 1)
    cheapest.masked_fill_(overflow, torch.finfo(cheapest.dtype).max)
    cheapest.masked_fill_(importance[..., :candidates] == -torch.inf, -1)  # empty slots go first
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


def _pool(entries: Tensor, bias: Tensor, log_weight: Tensor, pairs: _Pairs, anchor: Tensor) -> tuple[Tensor, Tensor]:
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
    new_bias = total.log() + top - (pooled[..., : anchor.shape[-1]] @ anchor.mT).squeeze(-1)
    return pooled, torch.where(same, left_bias, new_bias)


def _new_index(pairs: _Pairs, total: int) -> Tensor:
    """(B, H, n): where the slots in the order of rising importance are after the merge."""
    source, stay, target = pairs
    count = torch.arange(total, device=stay.device).expand(*stay.shape[:2], -1)
    kept, candidates = stay.shape[2], stay.shape[2] + source.shape[2]
    index = torch.cat([count[..., :candidates], count[..., kept : kept + total - candidates]], 2)
    return index.scatter(2, stay, count[..., :kept]).scatter(2, source, target)


def _centred(key: Tensor, log_weight: Tensor) -> Tensor:
    """Keys (B, H, n, D) about the mean of those that are not empty."""
    live = (log_weight > -torch.inf).sum(-1)[..., None, None].clamp_min(1)
    return key - key.sum(2, keepdim=True) / live


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Slots (B, H, n, E) by index (B, H, m)."""
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
