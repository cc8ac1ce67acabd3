"""The portable engine: chunked matrix products in torch, on any device, with any kernel."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.base import Kernel, compute_dtype
from ..sums import chunks
from ..sums.state import Sums
from . import stretches

CHECKS_FINITE = False  # the caller looks at the result
CHUNK = 64  # tokens of a causal chunk: wide enough for matrix products, narrow enough to waste little on its mask


def absorb(
    kernel: Kernel,
    key: Tensor,
    value: Tensor,
    state: Sums,
    *,
    scale: float | None,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    log_input: Tensor | None,
) -> Sums:
    """The state after adding keys (B, H, S, D) and values (B, H, S, M)."""

    def stretch(k: Any, v: Any, mask: Any, decay: Any, gain: Any, sums: Tensor, level: Tensor) -> Any:
        features, beta, values = _keys(kernel, k, v, mask, _gate(decay, gain), scale)
        return None, None, *_decayed(*chunks.absorb(features, beta, values, sums, level), decay)

    pieces = (key, value, key_mask, log_decay, log_input)
    _, _, sums, level = stretches.run(stretch, kernel, pieces, _join(state), state.log_scale, rows=None)
    return _split(state, sums, level, _count(key, key_mask))


def read(kernel: Kernel, query: Tensor, state: Sums, *, scale: float | None) -> tuple[Tensor, Sums]:
    """What queries (B, Hq, L, D) get from a state: (B, Hq, L, M)."""
    B, heads = query.shape[:2]
    H = state.Z.shape[1]

    def stretch(q: Tensor, sums: Tensor, level: Tensor) -> Any:
        features = kernel.scaled_query_features(q, scale=scale)[0]
        out, small = chunks.divide(features.reshape(B, H, heads // H * q.shape[-2], features.shape[-1]) @ sums)
        return out.reshape(B, heads, q.shape[-2], -1), small.sum(-1), sums, level

    rows = (B, heads, query.shape[-2], state.value_dim)
    out, small, _, _ = stretches.run(stretch, kernel, (query,), _join(state), state.log_scale, rows=rows)
    assert out is not None
    guarded = 0 if small is None else small * (state.tokens > 0)
    return out, replace(state, guarded=state.guarded + guarded)


def causal(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Sums,
    *,
    scale: float | None,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    log_input: Tensor | None,
) -> tuple[Tensor, Sums]:
    """Queries (B, Hq, T, D) against the state and the keys up to their own; and the state after them.

    log_decay (B, H, T) multiplies the sums before each token is added, log_input (B, H, T) the token itself.
    """
    B, heads, T = query.shape[:3]
    H = key.shape[1]

    def stretch(q: Any, k: Any, v: Any, mask: Any, decay: Any, gain: Any, sums: Tensor, level: Tensor) -> Any:
        features, beta, values = _keys(kernel, k, v, mask, _gate(decay, gain), scale)
        query_features = kernel.scaled_query_features(q, scale=scale)[0]
        query_features = query_features.reshape(B, H, heads // H, q.shape[-2], features.shape[-1])
        chunk = min(CHUNK, q.shape[-2])
        out, sums, level = chunks.causal(query_features, features, beta, values, sums, level, chunk)
        out, small = chunks.divide(out)
        return out.reshape(B, heads, q.shape[-2], -1), small.sum((-2, -1)), *_decayed(sums, level, decay)

    pieces = (query, key, value, key_mask, log_decay, log_input)
    rows = (B, heads, T, value.shape[-1])
    sums, level = _join(state), state.log_scale
    out, small, sums, level = stretches.run(stretch, kernel, pieces, sums, level, rows=rows, multiple=CHUNK)
    assert out is not None
    guarded: Any = 0 if small is None else small
    if key_mask is not None:  # rows that saw no key at all are 0 by right, not by the guard
        blind = (key_mask.cumsum(-1) == 0).sum(-1, keepdim=True) * (heads // H)
        guarded = guarded - blind * (state.tokens == 0)
    new = _split(state, sums, level, _count(key, key_mask))
    return out, replace(new, guarded=state.guarded + guarded)


def _keys(
    kernel: Kernel, key: Tensor, value: Tensor, mask: Tensor | None, gate: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Features, log-weights and values with a column of ones. A masked key counts nothing, even if it holds NaN."""
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    features, beta = kernel.scaled_key_features(key, scale=scale)
    if gate is not None:
        beta = gate if beta is None else beta.to(gate.dtype) + gate
    if mask is not None:
        if beta is None:
            features = features.masked_fill(~mask[:, None, :, None], 0)
        else:
            beta = beta.masked_fill(~mask[:, None, :], -torch.inf)
    value = value.to(compute_dtype(value.dtype))
    return features, beta, torch.cat([value, torch.ones_like(value[..., :1])], -1)


def _gate(log_decay: Tensor | None, log_input: Tensor | None) -> Tensor | None:
    """Decay as a log-weight of each key: dividing key j by all the decay up to j is the same as decaying it later on."""
    if log_decay is None:
        return None
    gate = -log_decay.cumsum(-1)
    return gate if log_input is None else gate + log_input


def _decayed(sums: Tensor, level: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Applies a stretch's decay to the sums after it: to the numbers in the scale, to the gradient in the sums."""
    if log_decay is None:
        return sums, level
    total = log_decay.sum(-1)
    return sums * (total - total.detach()).exp().to(sums.dtype)[..., None, None], (level + total.detach()).to(
        sums.dtype
    )


def _join(state: Sums) -> Tensor:
    return torch.cat([state.S, state.Z.unsqueeze(-1)], -1)


def _split(state: Sums, sums: Tensor, level: Tensor, tokens: Tensor | int) -> Sums:
    S, Z = sums[..., :-1].contiguous(), sums[..., -1].contiguous()
    return replace(state, S=S, Z=Z, log_scale=level.contiguous(), tokens=state.tokens + tokens)


def _count(key: Tensor, mask: Tensor | None) -> Tensor | int:
    return key.shape[-2] if mask is None else mask.sum(-1, keepdim=True)
