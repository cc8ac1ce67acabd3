"""The far field: slots that stand for many keys, and how they are merged.

A slot that stands for the keys J keeps, with a the mean query, lw = log sum_J exp(a.y_j) and the means k, v of its keys and
values under p_j = exp(a.y_j - lw). Its logit for a query x is lw + (x - a).k = x.k + bias: exact for one key, first order
around the mean query for many. Only the bias is kept; it is 0 for a single key, whatever the anchor.

Shapes: entries (B, H, n, E) are keys beside values, bias (B, H, n), -inf for an empty slot.
"""

import torch
from torch import Tensor


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
) -> tuple[Tensor, Tensor]:
    """Merges n slots into `size`, the cheapest pairs first; empty ones vanish before anything else is touched."""
    while entries.shape[2] > size:
        target = max(size, (entries.shape[2] + 1) // 2)
        entries, bias, _ = merge_once(entries, bias, target, anchor, metric, alpha)
    return entries, bias


def merge_once(
    entries: Tensor, bias: Tensor, size: int, anchor: Tensor, metric: Tensor, alpha: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """At most half of the slots go into others. Also returns the plan, for `places`."""
    dim = metric.shape[-1]
    tilt = (entries[..., :dim] * anchor).sum(-1)
    weight = bias + tilt  # lw
    source, target, into = _plan(entries.detach()[..., :dim], weight.detach(), size, metric, alpha)
    # Pool in scaled form: the heaviest member of each new slot has weight 1.
    w_target, w_source = weight.gather(2, target), weight.gather(2, source)
    top = w_target.detach().scatter_reduce(2, into, w_source.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)
    p_target, p_source = (w_target - top).exp(), (w_source - top.gather(2, into)).exp()
    total = p_target.scatter_add(2, into, p_source)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    added = _take(entries, source) * p_source.unsqueeze(-1)
    pooled = (_take(entries, target) * p_target.unsqueeze(-1)).scatter_add(
        2, into.unsqueeze(-1).expand_as(added), added
    ) / total.unsqueeze(-1)
    pooled_bias = (total.log() + top - (pooled[..., :dim] * anchor).sum(-1)).masked_fill(empty, -torch.inf)
    # A slot that took nothing in keeps its bits: a single key stays exact for ever.
    touched = torch.zeros_like(target).scatter_add_(2, into, (w_source > -torch.inf).long()) > 0
    pooled_bias = torch.where(touched, pooled_bias, bias.gather(2, target))
    return pooled, pooled_bias, (source, target, into)


def places(source: Tensor, target: Tensor, into: Tensor) -> Tensor:
    """The new index (B, H, n) of every old slot."""
    old = torch.cat([source, target], 2)
    new = torch.arange(target.shape[2], device=old.device).expand_as(target)
    return torch.empty_like(old).scatter_(2, old, torch.cat([into, new], 2))


@torch.no_grad()
def _plan(key: Tensor, weight: Tensor, size: int, metric: Tensor, alpha: float) -> tuple[Tensor, ...]:
    """Which slots go into which: indices of sources, of targets, and each source's place among targets.

    Importance u = E_q[exp(q.k)]^alpha under a Gaussian of the queries seen. A slot may go into any that is more important;
    a pair costs its squared distance in the metric of the queries times u_i u_j / (u_i + u_j).
    """
    M = key.shape[2]
    empty = weight == -torch.inf
    key = key - key.sum(2, keepdim=True) / (M - empty.sum(-1))[..., None, None].clamp_min(1)
    spread = ((key @ metric) * key).sum(-1)
    level = weight + spread / 2  # log E_q[exp(q.k)], up to a constant
    level, order = level.sort(-1)
    key, spread, empty = _take(key, order), spread.gather(2, order), empty.gather(2, order)
    inverse = (alpha * (level[..., -1:] - level).nan_to_num(nan=0.0)).clamp_max(46).exp()  # 1 / u
    cost = torch.baddbmm(
        spread.flatten(0, 1).unsqueeze(-1), (key @ metric).flatten(0, 1), key.flatten(0, 1).mT, alpha=-2
    ).unflatten(0, key.shape[:2])
    cost = cost.add_(spread.unsqueeze(-2)).clamp_min_(0)
    cost = cost.div_(inverse.unsqueeze(-1) + inverse.unsqueeze(-2))
    less = torch.ones(M, M, dtype=torch.bool, device=key.device).tril()
    cheapest, into = cost.masked_fill_(less, torch.inf).min(-1)
    gone = torch.ones_like(empty).scatter_(
        2, cheapest.masked_fill(empty, -1).argsort(-1)[..., M - size :].sort(-1)[0], False
    )
    # A source whose target goes too follows it.
    root = torch.where(gone, into, torch.arange(M, device=key.device))
    for _ in range(M.bit_length()):
        root = root.gather(2, root)
    by = gone.to(torch.uint8).argsort(dim=-1, stable=True, descending=True)
    source, target = by[..., : M - size], by[..., M - size :]
    rank = torch.empty_like(by).scatter_(2, target, torch.arange(size, device=key.device).expand_as(target))
    return order.gather(2, source), order.gather(2, target), rank.gather(2, root.gather(2, source))


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
