"""The naive twin: attention as its definition reads, in O(N^2). Ground truth for tests, and the way to see a kernel."""

import torch
from torch import Tensor

from ..kernels.base import Kernel
from ..kernels.exact import Exact


def weights(
    query: Tensor,
    key: Tensor,
    kernel: Kernel,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    decay: Tensor | None = None,
    gate: Tensor | None = None,
    from_features: bool = True,
) -> Tensor:
    """The attention matrix (..., heads, L, S) that a kernel implies; rows sum to 1, or are 0 where nothing is visible.

    from_features: of the features themselves (what the linear form computes) or of the exact similarity.
    """
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if groups > 1:
        key = key.repeat_interleave(groups, -3)
    L, S = query.shape[-2], key.shape[-2]
    visible = torch.ones(L, S, dtype=torch.bool, device=query.device)
    if is_causal:
        visible = visible.tril(S - L)
    if key_mask is not None:
        hidden = ~key_mask.unsqueeze(-1)
        key = key.masked_fill(hidden.unsqueeze(-3) if key.dim() > 2 else hidden, 0)
        visible = visible & key_mask.unsqueeze(-2).unsqueeze(-3) if query.dim() > 2 else visible & key_mask.unsqueeze(-2)
    if isinstance(kernel, Exact):
        logits = kernel._widen(query) @ kernel._widen(key).mT * kernel.logit_scale(query.shape[-1], scale)
        return torch.nan_to_num(logits.masked_fill(~visible, -torch.inf).softmax(-1))
    if from_features:
        query_features, _ = kernel.scaled_query_features(query, scale=scale)
        key_features, beta = kernel.scaled_key_features(key, scale=scale)
        sim = query_features @ key_features.mT
    else:
        sim, beta = kernel.similarity(query, key, scale=scale), None
    sim = sim.masked_fill(~visible, 0)
    log_weight = torch.zeros(key.shape[:-1], dtype=sim.dtype, device=sim.device) if beta is None else beta
    for forget in (decay, gate):
        if forget is not None:
            forget = forget.repeat_interleave(groups, -2) if groups > 1 else forget
            log_weight = log_weight - forget.log().cumsum(-1)
    if gate is not None:
        log_weight = log_weight + (1 - (gate.repeat_interleave(groups, -2) if groups > 1 else gate)).log()
    table = log_weight.unsqueeze(-2).expand(sim.shape).masked_fill(~visible, -torch.inf)
    top = table.detach().amax(-1, keepdim=True) if S else table.new_zeros(*table.shape[:-1], 1)
    sim = sim * (table - top.masked_fill(top == -torch.inf, 0)).exp()
    total = sim.sum(-1, keepdim=True)
    empty = total.detach().abs() <= torch.finfo(sim.dtype).tiny
    return (sim / total.masked_fill(empty, 1)).masked_fill(empty, 0)


def attention(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, **options: object) -> Tensor:
    """weights @ value."""
    matrix = weights(query, key, kernel, **options)  # type: ignore[arg-type]
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if groups > 1:
        value = value.repeat_interleave(groups, -3)
    if options.get("key_mask") is not None:
        hidden = ~options["key_mask"].unsqueeze(-1)  # type: ignore[attr-defined]
        value = value.masked_fill(hidden.unsqueeze(-3) if value.dim() > 2 else hidden, 0)
    return matrix @ value.to(matrix.dtype)
