"""Near/far attention without is_causal and without a state, in the native library: all keys are merged, and then attended to.

The torch engine has the same algorithm in bidirectional.py.
"""

import ctypes
from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines.native import output_pool
from ..engines.native.bindings import DTYPES, check_flags, rows
from ..engines.native.ffi import NOT_FINITE, BidirectionalCall, library
from ..states import finite
from .bidirectional import TRUST
from .kernel import NearFar


class Plan(NamedTuple):
    """What all calls of one kernel, scale and shape have in common. sizes: what `call` points to."""

    call: BidirectionalCall
    out_shape: tuple[int, int, int, int]
    sizes: ctypes.Array[c_int64]


def make_plan(
    kernel: NearFar, scale: float | None, query: Tensor, key: Tensor, value: Tensor, count: int
) -> Plan | None:
    """Of calls with query (B, Hq, L, D), key (B, H, S, D) and value (B, H, S, M); None if other forms serve them.

    count: how many keys are visible, at most. Where all fit, softmax is exact; recall and biases by position have torch forms.
    """
    (B, heads, L, D), (H, S, M) = query.shape, (*key.shape[1:3], value.shape[3])
    budgets = kernel.budgets(H)
    room = kernel.window + kernel.sinks
    if kernel.positions or any(kernel.recalls(H)) or min(L, count) <= room + max(budgets):
        return None
    sizes = (c_int64 * H)(*(budgets if L == S else [room + m for m in budgets]))
    call = BidirectionalCall(batch=B, heads=heads, kv_heads=H, queries=L, keys=S, dim=D, value_dim=M)
    call.same_tokens, call.window, call.block = (1, kernel.window, kernel.block) if L == S else (0, 0, 1)
    call.dtype, call.sizes = DTYPES[query.dtype], ctypes.addressof(sizes)
    call.sqrt_scale, call.logit_cap = kernel.logit_scale(D, scale) ** 0.5, kernel.logit_cap or 0.0
    call.alpha = TRUST * kernel.alpha
    return Plan(call, (B, heads, L, M), sizes)


def attend(plan: Plan, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, Hq, L, M) in float32. mask: (B, S), which keys are visible, or None for all."""
    call = BidirectionalCall.from_buffer_copy(plan.call)
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        query, key, value = rows(query), rows(key), rows(value)
    call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    call.query_stride[:], call.key_stride[:], call.value_stride[:] = (x.stride()[:3] for x in (query, key, value))
    if mask is not None:
        mask = mask.contiguous()
        call.mask = mask.data_ptr()
    out = output_pool.empty(*plan.out_shape)
    call.out, call.threads = out.data_ptr(), torch.get_num_threads()
    flags = library.nearfar_bidirectional(ctypes.byref(call))
    if flags:
        if flags & NOT_FINITE:
            finite.refuse(torch.float32, query=query, key=key, value=value)
        check_flags(flags)
    return out
