"""Kernels without a native map: torch makes their features, one stretch of tokens at a time; the sums are native."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.base import Kernel
from ...sums.state import Sums
from .. import stretches
from .maps import NativeMap

MULTIPLE = 48  # a causal block of the native code


def absorb(
    apply: Any, fmap: NativeMap, kernel: Kernel, state: Sums, scale: float | None, *pieces: Tensor | None
) -> Sums:
    """Pieces: key, value, mask, log-weight."""

    def stretch(k: Any, v: Any, mask: Any, weight: Any, sums: Tensor, level: Tensor) -> Any:
        features, weight = _keys(kernel, k, scale, mask, weight)
        tensors = features, v.to(features.dtype), *_parts(sums), level, state.tokens, mask, weight
        S, Z, level, _ = apply("absorb", _scaled(fmap, weight is not None), tensors)
        return None, None, _joined(S, Z), level

    start = _joined(state.S, state.Z)
    _, _, sums, level = stretches.run(stretch, kernel, pieces, start, state.log_scale, rows=None)
    S, Z = _parts(sums)
    return replace(state, S=S, Z=Z, log_scale=level, tokens=state.tokens + _count(pieces[0], pieces[2]))


def read(
    apply: Any, fmap: NativeMap, kernel: Kernel, state: Sums, scale: float | None, query: Tensor
) -> tuple[Tensor, Sums]:
    none = torch.zeros_like(state.guarded)

    def stretch(q: Tensor, sums: Tensor, level: Tensor) -> Any:
        features = kernel.scaled_query_features(q, scale=scale)[0]
        out, small = apply("read", fmap, (features, *_parts(sums), level, state.tokens, none))
        return out, small, sums, level

    rows = (*query.shape[:3], state.value_dim)
    start = _joined(state.S, state.Z)
    out, small, _, _ = stretches.run(stretch, kernel, (query,), start, state.log_scale, rows=rows)
    assert out is not None
    return out, state if small is None else replace(state, guarded=state.guarded + small)


def causal(
    apply: Any, fmap: NativeMap, kernel: Kernel, state: Sums, scale: float | None, *pieces: Tensor | None
) -> tuple[Tensor, Sums]:
    """Pieces: query, key, value, mask, log-decay, log-weight."""
    query, key, value, mask = pieces[:4]
    assert query is not None
    assert key is not None
    assert value is not None
    none, seen = torch.zeros_like(state.guarded), torch.ones_like(state.tokens)

    def stretch(q: Any, k: Any, v: Any, mask: Any, decay: Any, weight: Any, sums: Tensor, level: Tensor) -> Any:
        features, weight = _keys(kernel, k, scale, mask, weight)
        query_features = kernel.scaled_query_features(q, scale=scale)[0]
        tensors = query_features, features, v.to(features.dtype), *_parts(sums), level, seen, none, mask, decay, weight
        scaled = weight is not None or decay is not None
        out, S, Z, level, _, small, _ = apply("causal", _scaled(fmap, scaled), tensors)
        return out, small, _joined(S, Z), level

    rows = (*query.shape[:3], value.shape[-1])
    start = _joined(state.S, state.Z)
    out, small, sums, level = stretches.run(
        stretch, kernel, pieces, start, state.log_scale, rows=rows, multiple=MULTIPLE
    )
    assert out is not None
    guarded: Any = 0 if small is None else small
    if mask is not None:  # rows that saw no key at all are 0 by right, not by the guard
        blind = (mask.cumsum(-1) == 0).sum(-1, keepdim=True) * (query.shape[1] // key.shape[1])
        guarded = guarded - blind * (state.tokens == 0)
    S, Z = _parts(sums)
    tokens = state.tokens + _count(key, mask)
    return out, replace(state, S=S, Z=Z, log_scale=level, tokens=tokens, guarded=state.guarded + guarded)


def _keys(
    kernel: Kernel, key: Tensor, scale: float | None, mask: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Features of keys, hidden ones being 0 first, and the logarithm of what else multiplies each key."""
    if mask is not None:
        key = key.masked_fill(~mask[:, None, :, None], 0)
    features, log_weight = kernel.scaled_key_features(key, scale=scale)
    if log_weight is None:
        return features, weight
    return features, log_weight.double() if weight is None else weight + log_weight


def _scaled(fmap: NativeMap, scaled: bool) -> NativeMap:
    return replace(fmap, scaled=True) if scaled else fmap


def _joined(S: Tensor, Z: Tensor) -> Tensor:
    return torch.cat([S, Z.unsqueeze(-1)], -1)


def _parts(sums: Tensor) -> tuple[Tensor, Tensor]:
    return sums[..., :-1], sums[..., -1]


def _count(key: Tensor | None, mask: Tensor | None) -> Tensor | int:
    assert key is not None
    return key.shape[-2] if mask is None else mask.sum(-1, keepdim=True)
