"""Fast paths: calls without masks, gates or gradients, with as little Python around the arithmetic as possible.

What calls of one kernel and one shape have in common is worked out once and kept as a plan. `prefill` serves a call from
nothing that returns no state, `prefill_with_state` a causal call that takes or returns one, `decode` one token that goes on
from a state. They return None where the call is not eligible: then the long way serves it, or says what is wrong with it.
"""

import ctypes
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads, is_grad_enabled, strided
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from ...kernels.base import Kernel, is_recorded
from ...states import finite
from ...states.base import pack_of
from ...states.layout import check_values
from ...states.linear import LinearState, Pack
from . import output_pool
from .bindings import DTYPES, check_flags, map_call, rows
from .feature_maps import NativeMap, make_map
from .ffi import MOST_GROUPS, NOT_FINITE, LinearCall, library
from .output_pool import FLOATS

MOST_SHAPES = 512  # that are remembered for a kernel


# Maps, made once for each kernel, scale and dim ----------------------------------------------------------------------


class _Known(NamedTuple):
    """guarded: the newest plans of one token, after the scale and enable_gqa of their calls and guards of their tensors."""

    kernel: weakref.ref[Kernel]
    stamp: tuple[int, int]
    maps: dict[tuple[float | None, int], NativeMap]
    guarded: list[tuple[float | None, bool, Any, Any]]


known_kernels: dict[int, _Known] = {}  # by id: a WeakKeyDictionary is slower than all the rest of a short call


def native_map(kernel: Kernel, scale: float | None, dim: int) -> NativeMap:
    """The map of a kernel, made once for every scale and remade when the kernel's weights change."""
    if is_compiling():  # the weights become part of the graph, and follow the kernel's
        return make_map(kernel, scale, dim)
    return _known_map(kernel, scale, dim)


def _known_map(kernel: Kernel, scale: float | None, dim: int) -> NativeMap:
    now, number = _stamp(kernel), id(kernel)
    known = known_kernels.get(number)
    if known is None or known.kernel() is not kernel or known.stamp != now:
        known = known_kernels[number] = _Known(weakref.ref(kernel, lambda ref: _forget(number, ref)), now, {}, [])
    made = known.maps.get((scale, dim))
    if made is None:
        with torch.inference_mode(False):  # it is kept for calls outside as well
            made = known.maps[scale, dim] = make_map(kernel, scale, dim)
    return made


def _stamp(kernel: Kernel) -> tuple[int, int]:
    """Changes with every change of the kernel, however it was made: also by `.data`, numpy or shared memory."""
    changes, projection = kernel.changes, kernel._buffers.get("projection")
    if projection is None:
        return changes, 0
    if not projection.is_contiguous() or projection.is_neg():
        projection = projection.contiguous().resolve_neg()
    return changes, library.checksum(projection.data_ptr(), projection.nbytes)


def _forget(number: int, ref: weakref.ref[Kernel]) -> None:
    known = known_kernels.get(number)
    if known is not None and known.kernel is ref:  # else another kernel has that id by now
        del known_kernels[number]


def eligible(*tensors: Tensor) -> bool:
    """Whether these are plain numbers in memory and no graph, gradient or transform is wanted."""
    if is_compiling() or _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if (_len_torch_dispatch_stack() or _is_tracing()) and is_recorded():
        return False
    grad = is_grad_enabled()
    for x in tensors:  # any() would take as long as all the rest
        if (grad and x.requires_grad) or x.is_neg() or x.layout is not strided:
            return False
        if not x.is_cpu or (type(x) is not Tensor and type(x) is not Parameter):
            return False
    return True


def find(
    kernel: Kernel, scale: float | None, query: Tensor, key: Tensor, value: Tensor, *form: bool
) -> tuple[NativeMap, Hashable] | None:
    """The kernel's map, and the key under which it keeps the plan of such calls; None if the call is not eligible."""
    if not (isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    projection = kernel._buffers.get("projection")
    if not (eligible(query, key, value) if projection is None else eligible(query, key, value, projection)):
        return None
    if scale is not None and not (isinstance(scale, float) and 0 < scale < float("inf")):
        return None
    shapes = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, *form
    return _known_map(kernel, scale, query.shape[-1]), shapes


def fixed_call(
    fmap: NativeMap, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> LinearCall | None:
    """The part of the library's structure that all calls of these shapes share; None where they must go the long way."""
    if not fmap.fused or fmap.form.prepared or not query.dim() == key.dim() == value.dim() == 4:
        return None
    B, heads, L, D = query.shape
    H, S, M = key.shape[1], key.shape[2], value.shape[3]
    if not (kernel.any_dim or kernel.dim == D):
        return None
    if tuple(key.shape) != (B, H, S, D) or tuple(value.shape) != (B, H, S, M) or 0 in (B, H, L, S, D, M):
        return None
    if heads % H or heads > MOST_GROUPS * H or (heads != H and not enable_gqa):
        return None
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return None
    call = map_call(list(fmap.weights), *fmap.numbers())
    call.batch, call.heads, call.kv_heads, call.queries, call.keys, call.dim, call.value_dim = B, heads, H, L, S, D, M
    call.dtype = DTYPES[query.dtype]
    _set_strides(call, (heads * L * D, L * D, D), (H * S * D, S * D, D), (H * S * M, S * M, M))
    return call


def _set_strides(call: Any, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    call.query_stride[:], call.key_stride[:], call.value_stride[:] = query[:3], key[:3], value[:3]


def remember(fmap: NativeMap, shapes: Hashable, plan: object) -> Any:
    if len(fmap.plans) == MOST_SHAPES:
        fmap.plans.clear()
    fmap.plans[shapes] = plan
    return plan


# Many tokens ---------------------------------------------------------------------------------------------------------


class PrefillPlan(NamedTuple):
    address: int  # of `call`
    call: LinearCall
    out_shape: tuple[int, int, int, int]
    signature: str
    sizes: tuple[int, int, int, int]  # of the state: B, kv heads, features, value dim
    offsets: list[int]  # of the state's tensors in its buffer, in bytes
    floats: int  # in that buffer


def prefill(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor | None:
    """(B, heads, L, M), from nothing; the state is discarded."""
    plan = _prefill_plan(kernel, query, key, value, scale, is_causal, enable_gqa)
    if plan is None:
        return None
    at, call, out_shape = plan[:3]
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        query, key, value = rows(query), rows(key), rows(value)
        call = LinearCall.from_buffer_copy(call)
        _set_strides(call, query.stride(), key.stride(), value.stride())
        at = ctypes.addressof(call)
    out = output_pool.empty(*out_shape)
    flags = library.linear_forward(
        at, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), get_num_threads(), is_causal
    )
    if flags:
        if flags & NOT_FINITE:
            finite.refuse(torch.float32, query=query, key=key, value=value)
        check_flags(flags)
    return out if query.dtype is torch.float32 else out.to(query.dtype)


def prefill_with_state(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearState | None,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, LinearState] | None:
    """(B, heads, L, M), causal, and the state after the keys; None for `state` is the one before any token."""
    plan = _prefill_plan(kernel, query, key, value, scale, True, enable_gqa)
    if plan is None or (state is not None and state.kernel != plan.signature):
        return None
    call = LinearCall.from_buffer_copy(plan.call)
    call.threads = get_num_threads()
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        query, key, value = rows(query), rows(key), rows(value)
        _set_strides(call, query.stride(), key.stride(), value.stride())
    call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if state is not None:
        pack = pack_of(state)
        if isinstance(pack, Pack) and pack.sizes == plan.sizes:
            at = pack.buffer.data_ptr()
            old = [at + offset for offset in plan.offsets]
        elif usable(state, plan.sizes):
            old = [x.data_ptr() for x in (state.S, state.Z, state.log_scale, state.tokens, state.guarded)]
        else:
            return None
        call.S, call.Z, call.log_scale, call.tokens, call.guarded = old
    fresh, out = FLOATS.new_empty(plan.floats), output_pool.empty(*plan.out_shape)
    at = fresh.data_ptr()
    new = [at + offset for offset in plan.offsets]
    call.S_new, call.Z_new, call.log_scale_new, call.tokens_new, call.guarded_new = new
    call.out = out.data_ptr()
    flags = library.linear_causal_forward(ctypes.byref(call))
    if flags:
        if flags & NOT_FINITE:
            held = {} if state is None else finite.of_state(state)
            finite.refuse(torch.float32, query=query, key=key, value=value, **held)
        check_flags(flags)
    made = LinearState.packed(plan.signature, Pack(fresh, plan.sizes))
    return out if query.dtype is torch.float32 else out.to(query.dtype), made


def _prefill_plan(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    is_causal: bool,
    enable_gqa: bool,
) -> PrefillPlan | None:
    found = find(kernel, scale, query, key, value, is_causal, enable_gqa)
    if found is None:
        return None
    fmap, shapes = found
    known: Any = fmap.plans.get(shapes, False)
    if known is not False:
        return known
    call = fixed_call(fmap, kernel, query, key, value, enable_gqa)
    if call is None or (is_causal and call.queries != call.keys):
        return remember(fmap, shapes, None)
    sizes = call.batch, call.kv_heads, fmap.form.features, call.value_dim
    out_shape = call.batch, call.heads, call.queries, call.value_dim
    state = kernel.signature(scale, call.dim), sizes, [4 * x for x in Pack.offsets(sizes)], Pack.floats(sizes)
    return remember(fmap, shapes, PrefillPlan(ctypes.addressof(call), call, out_shape, *state))


def usable(state: LinearState, sizes: tuple[int, int, int, int]) -> bool:
    """Whether a state whose tensors anyone may have changed is whole, of these sizes, and needs no conversion."""
    B, H, r, M = sizes
    shapes = {"S": (B, H, r, M), "Z": (B, H, r), "log_scale": (B, H), "tokens": (B, H), "guarded": (B, H)}
    tensors, grad = state.tensors(), is_grad_enabled()
    for name, shape in shapes.items():
        x, dtype = tensors.get(name), torch.int64 if name in ("tokens", "guarded") else torch.float32
        if type(x) is not Tensor or x.shape != shape or x.dtype is not dtype or x.layout is not strided:
            return False
        if not x.is_cpu or not x.is_contiguous() or x.is_neg() or (x.requires_grad and grad):
            return False
    try:
        check_values(tensors, state.table)
    except ValueError:
        return False
    return True
