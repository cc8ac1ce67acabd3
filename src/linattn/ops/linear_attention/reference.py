"""Attention by its O(N^2) definition: ground truth for tests, and the attention matrix of a kernel."""

from typing import Any

import torch
from torch import Tensor

from ...kernels.base import Kernel, compute_dtype
from ...kernels.softmax import Softmax
from .chunk import smallest
from .decay import STRONGEST_DECAY


def weights(query: Tensor, key: Tensor, kernel: Kernel, **options: Any) -> Tensor:
    """The attention matrix (..., heads, L, S) that a kernel implies; rows sum to 1, or are 0 where nothing is visible.

    Options are those of `similarities`.
    """
    sim = similarities(query, key, kernel, **options)
    total = sim.sum(-1, keepdim=True)
    empty = total.detach().abs() <= smallest(sim.dtype)
    return (sim / total.masked_fill(empty, 1)).masked_fill(empty, 0)


def similarities(
    query: Tensor,
    key: Tensor,
    kernel: Kernel,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    gate: Tensor | None = None,
    from_features: bool = True,
) -> Tensor:
    """Similarities (..., heads, L, S) of what each query may see, 0 elsewhere; every row up to a factor of its own.

    from_features: of the features themselves (what the linear form computes) or of the exact similarity.
    """
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if groups > 1:
        key = key.repeat_interleave(groups, -3)
        log_decay, gate = (None if x is None else x.repeat_interleave(groups, -2) for x in (log_decay, gate))
    L, S = query.shape[-2], key.shape[-2]
    visible = torch.ones(L, S, dtype=torch.bool, device=query.device)
    if is_causal:
        visible = visible.tril(S - L)
    if key_mask is not None:
        heads = (1,) * (key.dim() > 2)
        key_mask = key_mask.reshape(*key_mask.shape[:-1], *heads, S)
        key = key.masked_fill(~key_mask.unsqueeze(-1), 0)
        visible = visible & key_mask.unsqueeze(-2)
    if isinstance(kernel, Softmax):
        sim = torch.ones((), dtype=compute_dtype(query.dtype), device=query.device)
        log_weight = kernel.widen(query) @ kernel.widen(key).mT * kernel.logit_scale(query.shape[-1], scale)
    elif from_features:
        key_features, beta = kernel.scaled_key_features(key, scale=scale)
        sim = kernel.scaled_query_features(query, scale=scale)[0] @ key_features.mT
        log_weight = torch.zeros_like(sim) if beta is None else beta.unsqueeze(-2)
    else:
        sim = kernel.similarity(query, key, scale=scale)
        log_weight = torch.zeros_like(sim)
    forget = log_decay if gate is None else gate.log()
    if forget is not None:
        forget = forget.double().clamp_min(STRONGEST_DECAY)
        if key_mask is not None:  # a masked token does not decay
            forget = forget.masked_fill(~key_mask, 0)
        log_weight = log_weight - forget.cumsum(-1).unsqueeze(-2)
    if gate is not None:
        log_weight = log_weight + (1 - gate.double()).log().unsqueeze(-2)
    shape = torch.broadcast_shapes(sim.shape, log_weight.shape, visible.shape)
    log_weight = log_weight.expand(shape).masked_fill(~visible, -torch.inf)
    top = log_weight.detach().amax(-1, keepdim=True) if S else log_weight.new_zeros(*shape[:-1], 1)
    weight = (log_weight - top.masked_fill(top == -torch.inf, 0)).exp().to(sim.dtype)
    return sim.expand(shape).masked_fill(~visible, 0) * weight


def attention(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, **options: Any) -> Tensor:
    """weights @ value."""
    matrix = weights(query, key, kernel, **options)
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if groups > 1:
        value = value.repeat_interleave(groups, -3)
    if options.get("key_mask") is not None:
        hidden = ~options["key_mask"].unsqueeze(-1)
        value = value.masked_fill(hidden.unsqueeze(-3) if value.dim() > 2 else hidden, 0)
    return matrix @ value.to(matrix.dtype)
