"""Tensors into pointers: one function for each entry of the library.

Every map comes as `weights`, `ints` and `floats` (NativeMap.numbers), because operators take nothing richer.
"""

import ctypes
from collections.abc import Callable
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from . import output_pool as memory
from .ffi import NO_MEMORY, NOT_FINITE, LinearCall, library
from .output_pool import COUNTS, FLOATS

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SEGMENT = 480  # tokens between the sums that training keeps: r (M + 1) / 480 numbers per token


class NotFiniteError(ValueError):
    """LinearState or denominators are no longer finite."""


def update_state(
    key: Tensor,
    value: Tensor,
    S: Tensor | None,
    Z: Tensor | None,
    scale: Tensor | None,
    tokens: Tensor | None,
    mask: Tensor | None,
    log_weight: Tensor | None,
    weights: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S, Z, scale and tokens after adding keys (B, H, T, D) and values (B, H, T, M). LinearState of nothing may be None."""
    key, value = rows(key), rows(value)
    call = map_call(weights, ints, floats)
    keep = _set_keys(call, key, value, mask, None, log_weight)
    keep += _set_sums(call, S, Z, scale, tokens, tokens)
    new = _new_sums(call)
    _run(library.linear_update_state, call, keep)
    return new[0], new[1], new[2], new[3]


def read_state(
    query: Tensor,
    S: Tensor,
    Z: Tensor,
    scale: Tensor,
    tokens: Tensor,
    guarded: Tensor,
    weights: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, Tensor]:
    """Rows (B, Hq, L, M), and the count of guarded ones."""
    query = rows(query)
    call = map_call(weights, ints, floats)
    keep = _set_queries(call, query) + _set_sums(call, S, Z, scale, tokens, guarded)
    call.scaled = 1  # the sums' scale cancels: it is not applied
    call.kv_heads, call.value_dim = S.shape[1], S.shape[3]
    out = memory.empty(*query.shape[:3], S.shape[3])
    new_guarded = torch.empty_like(tokens)
    call.out, call.guarded_new = out.data_ptr(), new_guarded.data_ptr()
    _run(library.linear_read_state, call, keep)
    return out, new_guarded


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    S: Tensor | None,
    Z: Tensor | None,
    scale: Tensor | None,
    tokens: Tensor | None,
    guarded: Tensor | None,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_weight: Tensor | None,
    weights: list[Tensor],
    ints: list[int],
    floats: list[float],
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, S, Z, scale, tokens, guarded, and the sums that a backward pass starts from (empty without `train`)."""
    query, key, value = rows(query), rows(key), rows(value)
    call = map_call(weights, ints, floats)
    keep = _set_queries(call, query) + _set_keys(call, key, value, mask, log_decay, log_weight)
    keep += _set_sums(call, S, Z, scale, tokens, guarded)
    new = _new_sums(call)
    out = memory.empty(*query.shape[:3], value.shape[3])
    call.out = out.data_ptr()
    checkpoints = memory.empty(*checkpoints_shape(key, call.features, call.value_dim, train))
    if train:
        call.checkpoints, call.segment = checkpoints.data_ptr(), SEGMENT
    _run(library.linear_causal_forward, call, keep)
    return (out, *new, checkpoints)


def update_state_backward(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    log_weight: Tensor | None,
    scale_new: Tensor,
    grad_S: Tensor,
    grad_Z: Tensor,
    weights: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values (float32) and of each key's log-weight."""
    key, value = rows(key), rows(value)
    call = map_call(weights, ints, floats)
    keep = _set_keys(call, key, value, mask, None, log_weight)
    grad_S, grad_Z, scale_new = grad_S.contiguous(), grad_Z.contiguous(), scale_new.contiguous()
    call.grad_S_new, call.grad_Z_new, call.log_scale_new = grad_S.data_ptr(), grad_Z.data_ptr(), scale_new.data_ptr()
    grads = _new_key_grads(call, key, value)
    _run(library.linear_update_state_backward, call, [*keep, grad_S, grad_Z, scale_new])
    return grads


def read_state_backward(
    query: Tensor,
    S: Tensor,
    Z: Tensor,
    out: Tensor,
    grad_out: Tensor,
    weights: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, S and Z."""
    query, S, Z, out, grad_out = rows(query), S.contiguous(), Z.contiguous(), out.contiguous(), grad_out.contiguous()
    call = map_call(weights, ints, floats)
    keep = _set_queries(call, query)
    call.kv_heads, call.value_dim = S.shape[1], S.shape[3]
    call.S, call.Z, call.out, call.grad_out = S.data_ptr(), Z.data_ptr(), out.data_ptr(), grad_out.data_ptr()
    grads = memory.empty(*query.shape), FLOATS.new_empty(S.shape), FLOATS.new_empty(Z.shape)
    call.grad_query, call.grad_S, call.grad_Z = (x.data_ptr() for x in grads)
    _run(library.linear_read_state_backward, call, keep)
    return grads


def causal_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_weight: Tensor | None,
    out: Tensor,
    checkpoints: Tensor,
    grad_out: Tensor,
    grad_S: Tensor | None,
    grad_Z: Tensor | None,
    weights: list[Tensor],
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, each key's log-weight, and of the sums the segments' first one started from."""
    query, key, value = rows(query), rows(key), rows(value)
    out, grad_out = out.contiguous(), grad_out.contiguous()
    call = map_call(weights, ints, floats)
    keep = _set_queries(call, query) + _set_keys(call, key, value, mask, log_decay, log_weight)
    call.out, call.grad_out = out.data_ptr(), grad_out.data_ptr()
    call.checkpoints, call.segment = checkpoints.data_ptr(), SEGMENT
    if grad_S is not None and grad_Z is not None:
        grad_S, grad_Z = grad_S.contiguous(), grad_Z.contiguous()
        call.grad_S_new, call.grad_Z_new = grad_S.data_ptr(), grad_Z.data_ptr()
    grads = _new_key_grads(call, key, value)
    r, M = call.features, call.value_dim
    grad_query, old_S, old_Z = (
        memory.empty(*query.shape),
        FLOATS.new_empty(*key.shape[:2], r, M),
        FLOATS.new_empty(*key.shape[:2], r),
    )
    call.grad_query, call.grad_S, call.grad_Z = grad_query.data_ptr(), old_S.data_ptr(), old_Z.data_ptr()
    _run(library.linear_causal_backward, call, [*keep, grad_S, grad_Z])
    return (grad_query, *grads, old_S, old_Z)


def checkpoints_shape(key: Tensor, features: int, value_dim: int, train: bool) -> tuple[int, ...]:
    if not train:
        return (0,)
    return (*key.shape[:2], (key.shape[2] + SEGMENT - 1) // SEGMENT, features * (value_dim + 1) + 2)


def rows(x: Tensor) -> Tensor:
    """Numbers of one token side by side; batch, heads and tokens may lie anywhere."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def map_call(weights: list[Tensor], ints: list[int], floats: list[float]) -> LinearCall:
    call = LinearCall()
    call.feature_map, call.features, call.scaled = ints
    call.norm_coef, call.norm_const, call.input_scale = floats[:3]
    call.quadratic_low[0], call.quadratic_low[1], call.quadratic_high[0], call.quadratic_high[1] = floats[3:]
    if weights:
        call.projection, call.projection_t, call.projection_bias = (w.data_ptr() for w in weights)
    call.threads = torch.get_num_threads()
    return call


def _set_queries(call: LinearCall, query: Tensor) -> list[Tensor]:
    call.batch, call.heads, call.queries, call.dim = query.shape
    call.dtype, call.query = DTYPES[query.dtype], query.data_ptr()
    call.query_stride[0], call.query_stride[1], call.query_stride[2], _ = query.stride()
    return [query]


def _set_keys(
    call: LinearCall,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_weight: Tensor | None,
) -> list[Tensor]:
    call.batch, call.kv_heads, call.keys, call.dim = key.shape
    call.heads = call.heads or call.kv_heads
    call.value_dim, call.dtype = value.shape[3], DTYPES[key.dtype]
    call.key, call.value = key.data_ptr(), value.data_ptr()
    call.key_stride[0], call.key_stride[1], call.key_stride[2], _ = key.stride()
    call.value_stride[0], call.value_stride[1], call.value_stride[2], _ = value.stride()
    keep = [key, value]
    if mask is not None:
        keep.append(mask := mask.contiguous())
        call.mask = mask.data_ptr()
    if log_decay is not None:
        keep.append(log_decay := log_decay.double().contiguous())
        call.log_decay = log_decay.data_ptr()
    if log_weight is not None:
        keep.append(log_weight := log_weight.double().contiguous())
        call.log_weight = log_weight.data_ptr()
    return keep


def _set_sums(
    call: LinearCall,
    S: Tensor | None,
    Z: Tensor | None,
    scale: Tensor | None,
    tokens: Tensor | None,
    guarded: Tensor | None,
) -> list[Tensor]:
    if S is None or Z is None or scale is None or tokens is None or guarded is None:
        return []
    keep = [S.contiguous(), Z.contiguous(), scale.contiguous(), tokens.contiguous(), guarded.contiguous()]
    call.S, call.Z, call.log_scale, call.tokens, call.guarded = (x.data_ptr() for x in keep)
    return keep


def _new_sums(call: LinearCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, H, r = call.batch, call.kv_heads, call.features
    S, Z, scale = (FLOATS.new_empty(shape) for shape in ((B, H, r, call.value_dim), (B, H, r), (B, H)))
    counts, guarded = COUNTS.new_empty(B, H), COUNTS.new_empty(B, H)
    call.S_new, call.Z_new, call.log_scale_new = S.data_ptr(), Z.data_ptr(), scale.data_ptr()
    call.tokens_new, call.guarded_new = counts.data_ptr(), guarded.data_ptr()
    return S, Z, scale, counts, guarded


def _new_key_grads(call: LinearCall, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grads = memory.empty(*key.shape), memory.empty(*value.shape), memory.empty(*key.shape[:3])
    call.grad_key, call.grad_value, call.grad_log_weight = (x.data_ptr() for x in grads)
    return grads


def _run(entry: Callable[..., int], call: Structure, keep: list[Any]) -> None:
    """Runs without the interpreter's lock; `keep` holds the tensors whose memory is in use."""
    flags = entry(ctypes.byref(call))
    del keep
    check_flags(flags)


def check_flags(flags: int) -> None:
    if flags & NO_MEMORY:
        raise MemoryError("the native engine could not get its work space")
    if flags & NOT_FINITE:
        raise NotFiniteError("sums or denominators are not finite")
