"""A plain call from nothing that leaves no state, with as little Python around the arithmetic as there can be."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads

from ...kernels.base import Kernel
from ...sums import finite
from . import memory
from .calls import DTYPES, _map_call, _rows, check_flags, ordinary
from .library import MOST_GROUPS, NOT_FINITE, Call, library
from .maps import IDENTITY, NativeMap, known_map

MOST_SHAPES = 512  # that are remembered


def whole(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float | None, is_causal: bool, enable_gqa: bool
) -> Tensor | None:
    """The output, or None: then the long way serves the call, or says what is wrong with it."""
    if not (query.is_cpu and key.is_cpu and value.is_cpu) or kernel.dim != query.shape[-1]:
        return None
    projection = kernel._buffers.get("projection")
    if not (ordinary(query, key, value) if projection is None else ordinary(query, key, value, projection)):
        return None
    if scale is not None and not (isinstance(scale, float) and 0 < scale < float("inf")):
        return None
    fmap = known_map(kernel, scale, query.shape[-1])
    shapes = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, is_causal, enable_gqa
    plan = fmap.wholes.get(shapes, False)
    if plan is False:
        if len(fmap.wholes) == MOST_SHAPES:
            fmap.wholes.clear()
        plan = fmap.wholes[shapes] = _plan(fmap, query, key, value, is_causal, enable_gqa)
    if plan is None:
        return None
    at, call, out_shape = plan
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        query, key, value = _rows(query), _rows(key), _rows(value)
        call = Call.from_buffer_copy(call)
        _set_strides(call, query.stride(), key.stride(), value.stride())
        at = ctypes.addressof(call)
    out = memory.empty(*out_shape)
    flags = library.whole(
        at, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), get_num_threads(), is_causal
    )
    if flags:
        if flags & NOT_FINITE:
            finite.refuse(torch.float32, query=query, key=key, value=value)
        check_flags(flags)
    return out if query.dtype is torch.float32 else out.to(query.dtype)


class Plan(NamedTuple):
    """What calls of one map and one shape have in common."""

    at: int  # the address of `call`
    call: Call
    out_shape: tuple[int, int, int, int]


def _plan(fmap: NativeMap, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> Plan | None:
    """None where such calls cannot come this way."""
    if fmap.prepared or fmap.kind == IDENTITY or not query.dim() == key.dim() == value.dim() == 4:
        return None
    B, heads, L, D = query.shape
    H, S, M = key.shape[1], key.shape[2], value.shape[3]
    if tuple(key.shape) != (B, H, S, D) or tuple(value.shape) != (B, H, S, M) or 0 in (B, H, L, S, D, M):
        return None
    if heads % H or heads > MOST_GROUPS * H or (heads != H and not enable_gqa) or (is_causal and L != S):
        return None
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return None
    call = _map_call(list(fmap.weights), *fmap.numbers())
    call.batch, call.heads, call.kv_heads, call.queries, call.keys, call.dim, call.value_dim = B, heads, H, L, S, D, M
    call.dtype = DTYPES[query.dtype]
    _set_strides(call, (heads * L * D, L * D, D), (H * S * D, S * D, D), (H * S * M, S * M, M))
    return Plan(ctypes.addressof(call), call, (B, heads, L, M))


def _set_strides(call: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    call.query_stride[:], call.key_stride[:], call.value_stride[:] = query[:3], key[:3], value[:3]
