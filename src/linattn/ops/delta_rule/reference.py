"""The delta rule, token by token: the definition that every other form is tested against."""

import torch
from torch import Tensor

from ..heads import group_queries, match_keys
from .call import DeltaRuleCall


def normalized(x: Tensor) -> Tensor:
    """Rows divided by sqrt(sum of squares + 1e-6)."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def step(
    S: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token: S (B, H, D, M), query (B, H, G, D), key (B, H, D), value (B, H, M), beta (B, H), log_decay (B, H) or
    (B, H, D) -> rows (B, H, G, M) and the new S."""
    if log_decay is not None:
        decay = log_decay.exp()
        S = S * (decay[..., None, None] if decay.dim() == 2 else decay.unsqueeze(-1))
    predicted = (key.unsqueeze(-2) @ S).squeeze(-2)
    correction = beta.unsqueeze(-1) * (value - predicted)
    S = S + key.unsqueeze(-1) * correction.unsqueeze(-2)
    return query @ S, S


def delta_rule(call: DeltaRuleCall) -> tuple[Tensor, Tensor]:
    """Rows (B, Ho, T, M) and last states (B * n, H, D, M)."""
    query, key, value, beta, log_decay, mask, cu_seqlens, state, scale, normalize_qk = call
    dtype, H, T = query.dtype, value.shape[1], value.shape[2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    query, key, value, beta = (x.to(wide) for x in (query, key, value, beta))
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        beta = beta.masked_fill(hidden[..., 0], 0)
        if log_decay is not None:
            log_decay = log_decay.masked_fill(hidden if log_decay.dim() == 4 else hidden[..., 0], 0)
    if normalize_qk:
        query, key = normalized(query), normalized(key)
    query, key = group_queries(query * scale, H), match_keys(key, H)
    bounds = [0, T] if cu_seqlens is None else cu_seqlens
    n = len(bounds) - 1
    if state is None:
        state = value.new_zeros(value.shape[0] * n, H, key.shape[-1], value.shape[-1])
    rows, states = [], list(torch.unflatten(state.to(wide), 0, (value.shape[0], n)).unbind(1))
    for i in range(n):
        for t in range(bounds[i], bounds[i + 1]):
            g = None if log_decay is None else log_decay[:, :, t].to(wide)
            row, states[i] = step(states[i], query[:, :, :, t], key[:, :, t], value[:, :, t], beta[:, :, t], g)
            rows.append(row)
    out = torch.stack(rows, 3) if rows else query.new_zeros(*query.shape[:-1], value.shape[-1])
    return out.flatten(1, 2).to(dtype), torch.stack(states, 1).flatten(0, 1)
