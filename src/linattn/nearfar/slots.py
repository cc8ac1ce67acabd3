"""The far field: slots that stand for many keys, and how they are merged.

A slot that stands for the keys J keeps, with a the mean query, lw = log sum_J exp(a.y_j) and the means k, v of its keys and
values under p_j = exp(a.y_j - lw). Its logit for a query x is lw + (x - a).k = x.k + bias: exact for one key, first order
around the mean query for many. Only the bias is kept; it is 0 for a single key, whatever the anchor.

Shapes: entries (B, H, n, E) are keys beside values, bias (B, H, n), -inf for an empty slot.
"""

import torch
from torch import Tensor

CANDIDATES = 128  # at least so many slots, or twice as many as have to go, are looked at


def anchor_and_metric(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (B, H, 1, D) and covariance (B, H, D, D) of the queries seen; the identity while there are none.

    A small multiple of the identity is added, so that directions without queries still count for something.
    """
    dim = moments.shape[-1] - 1
    count = moments[..., dim:, dim:]  # (B, H, 1, 1)
    mean = moments[..., dim:, :dim] / count.clamp_min(1)
    metric = moments[..., :dim, :dim] / count.clamp_min(1) - mean.mT @ mean
    ridge = 1e-4 * metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-12)
    ridge = torch.where(count > 0, ridge, torch.ones_like(ridge))
    return mean, metric + ridge * torch.eye(dim, dtype=metric.dtype, device=metric.device)


def merge(
    entries: Tensor, bias: Tensor, size: int, anchor: Tensor, metric: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Merges n slots into `size`, the cheapest pairs first; empty ones vanish before anything else is touched.

    Also returns the new index (B, H, n) of every old slot.
    """
    dim = metric.shape[-1]
    weight = bias + (entries[..., :dim] @ anchor.mT).squeeze(-1)  # lw
    level, spread, order = _importance(entries.detach()[..., :dim], weight.detach(), metric)
    entries, bias, weight = _take(entries, order), bias.gather(2, order), weight.gather(2, order)
    gone, stay, into = _plan(entries.detach()[..., :dim], level, spread, size, metric, alpha)
    low = stay.shape[2] + gone.shape[2]
    kept = [torch.cat([x.gather(2, stay), x[..., low:]], 2) for x in (bias, weight)]
    held = torch.cat([_take(entries, stay), entries[:, :, low:]], 2)
    # Pool in scaled form: the heaviest member of each new slot has weight 1.
    source = weight.gather(2, gone)
    top = kept[1].detach().scatter_reduce(2, into, source.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    share, added = (kept[1] - top).exp(), (source - top.gather(2, into)).exp()
    total = share.scatter_add(2, into, added)
    # A slot that took nothing in keeps its bits: a single key stays exact for ever.
    same = total.detach() == share.detach()
    total = total.masked_fill(same, 1)
    moved = _take(entries, gone) * added.unsqueeze(-1)
    pooled = held * share.masked_fill(same, 1).unsqueeze(-1)
    pooled = pooled.scatter_add(2, into.unsqueeze(-1).expand_as(moved), moved) / total.unsqueeze(-1)
    level = total.log() + top - (pooled[..., :dim] @ anchor.mT).squeeze(-1)
    place = torch.empty_like(order).scatter_(2, order, _new_index(stay, gone, into, order.shape[2]))
    return pooled, torch.where(same, kept[0], level), place


@torch.no_grad()
def _importance(key: Tensor, weight: Tensor, metric: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log E_q[exp(q.k)] of each slot under a Gaussian of the queries seen, up to a constant, in rising order (B, H, n).

    Also returns the squared length of its key about the mean, in the metric of the queries, and the order.
    """
    live = (weight > -torch.inf).sum(-1)[..., None, None].clamp_min(1)
    key = key - key.sum(2, keepdim=True) / live
    spread = ((key @ metric) * key).sum(-1)
    level, order = (weight + spread / 2).sort(-1)
    return level, spread.gather(2, order), order


@torch.no_grad()
def _plan(
    key: Tensor, level: Tensor, spread: Tensor, size: int, metric: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Which slots go into which, of slots in the order of rising importance.

    Candidates are the least important ones; each may go into any that is more important, at the cost of the pair: its
    squared distance in the metric of the queries times u_i u_j / (u_i + u_j), u = exp(alpha level).

    Returns indices (B, H, .) of the candidates that go and of those that stay, and for each that goes its place among what
    is left: the candidates that stay, then all others.
    """
    M = key.shape[2]
    candidates = min(M, max(2 * (M - size), CANDIDATES))
    live = (level > -torch.inf).sum(-1)[..., None, None].clamp_min(1)
    key = key - key.sum(2, keepdim=True) / live
    projected = key[:, :, :candidates] @ metric
    inverse = (alpha * (level[..., -1:] - level).nan_to_num(nan=0.0)).clamp_max(46).exp()  # 1 / u
    cost = torch.baddbmm(
        spread.flatten(0, 1).unsqueeze(-2), projected.flatten(0, 1), key.flatten(0, 1).mT, alpha=-2
    ).unflatten(0, key.shape[:2])
    cost.add_(spread[..., :candidates].unsqueeze(-1)).clamp_min_(0)
    cost.div_(inverse[..., :candidates].unsqueeze(-1) + inverse.unsqueeze(-2))
    less = torch.ones(candidates, M, dtype=torch.bool, device=key.device).tril()
    cheapest, into = cost.masked_fill_(less, torch.inf).min(-1)
    by_cost = cheapest.masked_fill_(level[..., :candidates] == -torch.inf, -1).argsort(-1)
    gone = by_cost[..., : M - size]
    stay = by_cost[..., M - size :].sort(-1).values
    # A slot whose target goes too follows it.
    left = torch.arange(M, device=key.device).expand(*key.shape[:2], M)
    root = left.scatter(2, gone, into.gather(2, gone))
    for _ in range((M - size).bit_length()):
        root = root.gather(2, root)
    rank = torch.cat([stay, left[..., candidates:]], 2)
    rank = torch.empty_like(left).scatter_(2, rank, left[..., :size])
    return gone, stay, rank.gather(2, root.gather(2, gone))


def _new_index(stay: Tensor, gone: Tensor, into: Tensor, total: int) -> Tensor:
    """(B, H, n): where the slots of `_plan`'s order are after the merge."""
    count = torch.arange(total, device=stay.device).expand(*stay.shape[:2], -1)
    kept, low = stay.shape[2], stay.shape[2] + gone.shape[2]
    index = torch.cat([count[..., :low], count[..., kept : kept + total - low]], 2)
    return index.scatter(2, stay, count[..., :kept]).scatter(2, gone, into)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
