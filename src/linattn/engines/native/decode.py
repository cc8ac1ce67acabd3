"""Decode fast path: one token that goes on from a state, with as little Python around the arithmetic as possible."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, get_num_threads
from torch.compiler import is_compiling

from ...kernels.base import Kernel
from ...states import finite
from ...states.base import pack_of
from ...states.linear import LinearState, Pack
from .feature_maps import NativeMap
from .ffi import STALE, LinearCall, library
from .guards import guards_of, unwatched
from .output_pool import FLOATS
from .plans import find, fixed_call, known_kernels, remember, usable

MOST_GUARDS = 4  # that are remembered for a kernel


class StalePlan(Exception):
    """The kernel's projection was changed after the plan was made."""


class DecodePlan(NamedTuple):
    address: int  # of `call`
    call: LinearCall
    signature: str
    sizes: tuple[int, int, int, int]  # of the state: B, kv heads, features, value dim
    out_like: Tensor
    floats: int  # in the state's buffer
    projection_bytes: int  # of the kernel


def decode(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearState,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, LinearState] | None:
    """(B, heads, 1, M) and the state after the token."""
    guarded = _guarded_plan(kernel, query, key, value, scale, enable_gqa)
    if guarded is not None:
        try:
            return _run(*guarded, query, key, value, state)
        except StalePlan:
            pass
    plan = _find_decode_plan(kernel, query, key, value, scale, enable_gqa)
    if plan is None:
        return None
    return _run(plan, None, 0, query.contiguous(), key.contiguous(), value.contiguous(), state)


def _run(
    plan: DecodePlan, weights: int | None, checksum: int, query: Tensor, key: Tensor, value: Tensor, state: LinearState
) -> tuple[Tensor, LinearState] | None:
    """weights: the address of the kernel's projection, which must have this checksum; None if that is known."""
    if state.kernel != plan.signature:
        return None
    pack = pack_of(state)
    if isinstance(pack, Pack) and pack.sizes == plan.sizes:
        apart, old = None, pack.buffer.data_ptr()
    else:
        if not usable(state, plan.sizes):
            return None
        tensors = state.S, state.Z, state.log_scale, state.tokens, state.guarded
        apart, old = (ctypes.c_void_p * 5)(*[x.data_ptr() for x in tensors]), None
    plan.call.threads = get_num_threads()
    fresh, out = FLOATS.new_empty(plan.floats), empty_like(plan.out_like)
    q, k, v, new, to = query.data_ptr(), key.data_ptr(), value.data_ptr(), fresh.data_ptr(), out.data_ptr()
    flags = library.linear_decode(plan.address, q, k, v, apart, old, new, to, weights, plan.projection_bytes, checksum)
    if flags:
        if flags & STALE:
            raise StalePlan
        finite.refuse(torch.float32, query=query, key=key, value=value, **finite.of_state(state))
    made = LinearState.packed(plan.signature, Pack(fresh, plan.sizes))
    return out if query.dtype is torch.float32 else out.to(query.dtype), made


def _guarded_plan(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool
) -> tuple[DecodePlan, int | None, int] | None:
    """The plan of an earlier call whose tensors, all of them contiguous, these are like, and what `_run` compares before it
    trusts it; None if there is none."""
    if is_compiling():  # asked first: torch.compile cannot look a kernel that the graph makes up by its id
        return None
    known = known_kernels.get(id(kernel))
    if known is None or not unwatched() or known.kernel() is not kernel:
        return None
    changes, checksum = known.stamp
    if changes != kernel.changes:
        return None
    projection = kernel._buffers.get("projection")
    given = (query, key, value) if projection is None else (query, key, value, projection)
    for its_scale, its_gqa, guards, plan in known.guarded:
        if its_scale == scale and its_gqa is enable_gqa and guards.check(*given):
            return plan, None if projection is None else projection.data_ptr(), checksum
    return None


def _find_decode_plan(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool
) -> DecodePlan | None:
    """The plan of calls like this one, which the next of them find by their guards; None if the call is not eligible."""
    found = find(kernel, scale, query, key, value, enable_gqa)
    if found is None:
        return None
    fmap, shapes = found
    plan: Any = fmap.plans.get(shapes, False)
    if plan is False:
        plan = remember(fmap, shapes, _decode_plan(fmap, kernel, query, key, value, scale, enable_gqa))
    known, projection = known_kernels.get(id(kernel)), kernel._buffers.get("projection")
    given = [x for x in (query, key, value, projection) if x is not None]
    if plan is None or known is None or known.maps.get((scale, query.shape[-1])) is not fmap:
        return plan
    if all(x.is_contiguous() for x in given) and (guards := guards_of(given)) is not None:
        known.guarded[:] = [(scale, enable_gqa, guards, plan), *known.guarded[: MOST_GUARDS - 1]]
    return plan


def _decode_plan(
    fmap: NativeMap,
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> DecodePlan | None:
    call = fixed_call(fmap, kernel, query, key, value, enable_gqa)
    if call is None or (call.queries, call.keys) != (1, 1):
        return None
    sizes = call.batch, call.kv_heads, fmap.form.features, call.value_dim
    out_like = FLOATS.new_empty(call.batch, call.heads, 1, call.value_dim)
    signature = kernel.signature(scale, call.dim)
    projection = kernel._buffers.get("projection")
    size = 0 if projection is None else projection.nbytes
    return DecodePlan(ctypes.addressof(call), call, signature, sizes, out_like, Pack.floats(sizes), size)
