"""Kernels without a native form: torch makes their features, one segment of tokens at a time; the sums are native."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.base import Kernel
from ...states.linear import LinearState, count_written
from .. import checkpointing
from ..call import Call
from .feature_maps import NativeMap

MULTIPLE = 48  # BLOCK of csrc/linear/key_block.h: a causal block of the native code

Apply = Callable[..., Any]  # linear.apply


def update_state(
    apply: Apply, fmap: NativeMap, call: Call, key: Tensor, value: Tensor, state: LinearState
) -> LinearState:
    """Adds keys (B, H, S, D) and values (B, H, S, M)."""

    def segment(k: Any, v: Any, mask: Any, weight: Any, sums: Tensor, log_scale: Tensor) -> Any:
        features, weight = _keys(call.kernel, k, call.scale, mask, weight)
        tensors = features, v.to(features.dtype), *_split(sums), log_scale, state.tokens, mask, weight
        S, Z, log_scale, _ = apply("update_state", fmap, tensors, weighted=weight is not None)
        return None, None, _join(S, Z), log_scale

    pieces = key, value, call.key_mask, call.log_input
    _, _, sums, log_scale = checkpointing.run(
        segment, call.kernel, pieces, _join(state.S, state.Z), state.log_scale, rows=None
    )
    S, Z = _split(sums)
    tokens = state.tokens + count_written(key, call.key_mask)
    return replace(state, S=S, Z=Z, log_scale=log_scale, tokens=tokens)


def read_state(
    apply: Apply, fmap: NativeMap, call: Call, query: Tensor, state: LinearState
) -> tuple[Tensor, LinearState]:
    """What queries (B, Hq, L, D) get from a state: (B, Hq, L, M)."""
    none = torch.zeros_like(state.guarded)

    def segment(q: Tensor, sums: Tensor, log_scale: Tensor) -> Any:
        features = call.kernel.scaled_query_features(q, scale=call.scale)[0]
        out, small = apply("read_state", fmap, (features, *_split(sums), log_scale, state.tokens, none))
        return out, small, sums, log_scale

    rows = (*query.shape[:3], state.value_dim)
    start = _join(state.S, state.Z)
    out, small, _, _ = checkpointing.run(segment, call.kernel, (query,), start, state.log_scale, rows=rows)
    assert out is not None
    return out, state if small is None else replace(state, guarded=state.guarded + small)


def causal(
    apply: Apply, fmap: NativeMap, call: Call, query: Tensor, key: Tensor, value: Tensor, state: LinearState
) -> tuple[Tensor, LinearState]:
    """Queries (B, Hq, T, D) against the state and the keys up to their own; and the state after them."""
    kernel, scale = call.kernel, call.scale
    none, seen = torch.zeros_like(state.guarded), torch.ones_like(state.tokens)

    def segment(q: Any, k: Any, v: Any, mask: Any, decay: Any, weight: Any, sums: Tensor, log_scale: Tensor) -> Any:
        features, weight = _keys(kernel, k, scale, mask, weight)
        query_features = kernel.scaled_query_features(q, scale=scale)[0]
        before = *_split(sums), log_scale, seen, none
        tensors = query_features, features, v.to(features.dtype), *before, mask, decay, weight
        weighted = weight is not None or decay is not None
        out, S, Z, log_scale, _, small, _ = apply("causal", fmap, tensors, weighted=weighted)
        return out, small, _join(S, Z), log_scale

    pieces = query, key, value, call.key_mask, call.log_decay, call.log_input
    rows = (*query.shape[:3], value.shape[-1])
    start = _join(state.S, state.Z)
    out, small, sums, log_scale = checkpointing.run(
        segment, kernel, pieces, start, state.log_scale, rows=rows, multiple=MULTIPLE
    )
    assert out is not None
    guarded = state.guarded if small is None else state.guarded + small
    if call.key_mask is not None:  # fully masked rows are legitimately 0: do not count them
        blind = (call.key_mask.cumsum(-1) == 0).sum(-1, keepdim=True) * (query.shape[1] // key.shape[1])
        guarded = torch.maximum(guarded - blind * (state.tokens == 0), state.guarded)  # as in torch_engine.causal
    S, Z = _split(sums)
    tokens = state.tokens + count_written(key, call.key_mask)
    return out, replace(state, S=S, Z=Z, log_scale=log_scale, tokens=tokens, guarded=guarded)


def _keys(
    kernel: Kernel, key: Tensor, scale: float | None, mask: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Features of keys, masked ones set to 0 first, and the logarithm of what else multiplies each key."""
    if mask is not None:
        key = key.masked_fill(~mask[:, None, :, None], 0)
    features, log_weight = kernel.scaled_key_features(key, scale=scale)
    if log_weight is None:
        return features, weight
    return features, log_weight.double() if weight is None else weight + log_weight


def _join(S: Tensor, Z: Tensor) -> Tensor:
    return torch.cat([S, Z.unsqueeze(-1)], -1)


def _split(sums: Tensor) -> tuple[Tensor, Tensor]:
    return sums[..., :-1], sums[..., -1]
