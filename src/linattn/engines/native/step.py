"""One token at a time, with as little Python around the arithmetic as there can be."""

import ctypes
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, get_num_threads, is_grad_enabled

from ...kernels.base import Kernel
from ...sums import finite
from ...sums.state import Pack, Sums
from .calls import DTYPES, _map_call, ordinary
from .library import library
from .maps import IDENTITY, NativeMap, known_map, stamp
from .memory import FLOATS


class Plan(NamedTuple):
    """What the steps of one kernel and one shape have in common."""

    kernel: weakref.ref[Kernel]
    stamp: tuple[int, int] | None
    scale: float | None
    shapes: tuple[object, ...]
    call: int = 0  # the address of the Call that `keep` holds; 0 where such calls must go the long way
    keep: Any = None
    signature: str = ""
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the state: B, kv heads, features, value dim
    out_like: Tensor = FLOATS
    floats: int = 0


def step(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float | None, state: Sums, enable_gqa: bool
) -> tuple[Tensor, Sums] | None:
    """A plain one-token call that goes on from a state, or None: then the long way serves it, or says what is wrong."""
    if not ordinary(query, key, value):
        return None
    shapes = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, enable_gqa
    pack = state.__dict__.get("_pack")
    if isinstance(pack, Pack) and _fits(pack.about, kernel, scale, shapes):
        plan, apart, old = pack.about, None, pack.buffer.data_ptr()
    else:
        fmap = known_map(kernel, scale, query.shape[-1])
        plan = fmap.steps.get(shapes)
        if plan is None:
            plan = fmap.steps[shapes] = _plan(fmap, shapes, query, key, value, kernel, scale, enable_gqa)
        tensors = state.S, state.Z, state.log_scale, state.tokens, state.guarded
        if not plan.call or state.kernel != plan.signature or state.S.shape != plan.sizes or not _plain(tensors):
            return None
        apart, old = (ctypes.c_void_p * 5)(*[x.data_ptr() for x in tensors]), None
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    plan.keep.threads = get_num_threads()
    fresh, out = FLOATS.new_empty(plan.floats), empty_like(plan.out_like)
    q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
    flags = library.step(plan.call, q, k, v, apart, old, fresh.data_ptr(), out.data_ptr())
    if flags:
        finite.refuse(torch.float32, query=query, key=key, value=value)
    new = Sums.packed(plan.signature, Pack(fresh, plan.sizes, plan))
    return out if query.dtype is torch.float32 else out.to(query.dtype), new


def _fits(plan: Plan, kernel: Kernel, scale: float | None, shapes: tuple[object, ...]) -> bool:
    same = plan.kernel() is kernel and plan.stamp == stamp(kernel)
    return same and plan.scale == scale and plan.shapes == shapes


def _plain(tensors: tuple[Tensor, ...]) -> bool:
    if is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return tensors[0].is_cpu and tensors[0].dtype is torch.float32 and all(x.is_contiguous() for x in tensors)


def _plan(
    fmap: NativeMap,
    shapes: tuple[object, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    scale: float | None,
    enable_gqa: bool,
) -> Plan:
    """What calls of these shapes share; no Call where they cannot come this way."""
    known = weakref.ref(kernel), stamp(kernel), scale, shapes
    no = Plan(*known)
    if any(x.dim() != 4 or x.device.type != "cpu" or x.dtype not in DTYPES for x in (query, key, value)):
        return no
    B, heads, L, D = query.shape
    H, M = key.shape[1], value.shape[3]
    if kernel.dim != D and not kernel.any_dim:
        return no
    if (
        fmap.prepared
        or fmap.kind == IDENTITY
        or L != 1
        or tuple(key.shape) != (B, H, 1, D)
        or tuple(value.shape) != (B, H, 1, M)
        or M == 0
    ):
        return no
    if not query.dtype == key.dtype == value.dtype or B * H == 0 or heads % H or (heads != H and not enable_gqa):
        return no
    call = _map_call(list(fmap.weights), *fmap.numbers())
    call.batch, call.heads, call.kv_heads, call.queries, call.keys, call.dim, call.value_dim = B, heads, H, 1, 1, D, M
    call.dtype = DTYPES[query.dtype]
    call.query_stride[:] = [heads * D, D, D]
    call.key_stride[:] = [H * D, D, D]
    call.value_stride[:] = [H * M, M, M]
    sizes = B, H, fmap.features, M
    signature = kernel.signature(scale)
    return Plan(
        *known, ctypes.addressof(call), call, signature, sizes, FLOATS.new_empty(B, heads, 1, M), Pack.floats(sizes)
    )
