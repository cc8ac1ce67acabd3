"""The delta rule, plain, gated or with a decay for each channel (KDA): tensors into pointers.

S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - k_t^T S);  out_t = scale q_t^T S. Callers have checked the shapes and dtypes of a
DeltaRuleCall: beta, log_decay and the state are float32.
"""

import ctypes
import functools
import itertools
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.delta_rule.call import DeltaRuleCall
from . import output_pool
from .bindings import DTYPES, rows
from .ffi import NO_MEMORY, OTHER_VERSION, library
from .output_pool import FLOATS
from .plans import eligible
from .step_plan import NO_SPACE, StepPlan

SEGMENT = 512  # tokens between checkpoints of the state: csrc/delta/abi.h


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class DeltaCall(Structure):
    """Mirrors struct DeltaCall of csrc/delta/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch query_heads key_heads heads tokens dim value_dim sequences threads", c_int64),
        *_fields("dtype channels normalize", c_int32),
        ("scale", c_float),
        *_fields("query key value", c_void_p),
        *_fields("query_stride key_stride value_stride", c_int64 * 3),
        *_fields("beta log_decay", c_void_p),
        *_fields("beta_stride decay_stride", c_int64 * 3),
        *_fields("mask bounds state state_new out", c_void_p),
        ("out_stride", c_int64 * 3),
        *_fields("checkpoints grad_out", c_void_p),
        ("grad_out_stride", c_int64 * 3),
        *_fields("grad_state_new grad_query grad_key grad_value grad_beta grad_log_decay grad_state", c_void_p),
        ("parts", c_int64),
    ]


@functools.cache
def _entry(name: str) -> Any:
    """linattn_delta_<name> of the library."""
    if library.why_not is not None:
        raise RuntimeError(f"the native engine is not available: {library.why_not}.")
    size = library._library.linattn_delta_call_size
    size.restype = c_int64
    if size() != ctypes.sizeof(DeltaCall):
        raise RuntimeError(f"the native engine is not available: {OTHER_VERSION}.")
    entry = getattr(library._library, f"linattn_delta_{name}")
    entry.restype = c_int64 if name == "parts" else c_int32
    entry.argtypes = [c_void_p] * 11 + [c_int64] if name == "step" else [POINTER(DeltaCall)]
    return entry


def available() -> bool:
    """Whether the native library is there and has the delta rule."""
    return library.why_not is None and hasattr(library._library, "linattn_delta_call_size")


def _inputs(described: DeltaRuleCall) -> tuple[DeltaCall, list[Any]]:
    """A call with everything that it reads, and what must live until it is over."""
    query, key, value, beta, log_decay, mask, cu_seqlens, state, scale, normalize_qk = described
    query = query if query.stride(3) == 1 else rows(query)
    key = key if key.stride(3) == 1 else rows(key)
    value = value if value.stride(3) == 1 else rows(value)
    call = DeltaCall()
    call.batch, call.query_heads, call.tokens, call.dim = query.shape
    call.key_heads, call.heads, call.value_dim = key.shape[1], value.shape[1], value.shape[3]
    call.threads, call.dtype = torch.get_num_threads(), DTYPES[query.dtype]
    call.normalize, call.scale = normalize_qk, scale
    call.query, call.key, call.value, call.beta = query.data_ptr(), key.data_ptr(), value.data_ptr(), beta.data_ptr()
    call.query_stride[:], call.key_stride[:] = query.stride()[:3], key.stride()[:3]
    call.value_stride[:], call.beta_stride[:] = value.stride()[:3], beta.stride()
    keep: list[Any] = [query, key, value, beta]
    if log_decay is not None:
        call.channels = log_decay.dim() == 4
        log_decay = rows(log_decay) if call.channels else log_decay
        call.log_decay, call.decay_stride[:] = log_decay.data_ptr(), log_decay.stride()[:3]
        keep.append(log_decay)
    if mask is not None:
        keep.append(mask := mask.contiguous())
        call.mask = mask.data_ptr()
    if state is not None:
        keep.append(state := state.contiguous())
        call.state = state.data_ptr()
    ends = [0, query.shape[2]] if cu_seqlens is None else cu_seqlens
    keep.append(bounds := (c_int64 * len(ends))(*ends))
    call.bounds, call.sequences = ctypes.addressof(bounds), len(ends) - 1
    return call, keep


def _run(name: str, call: DeltaCall, keep: list[Any]) -> None:
    """keep: what must live until the call is over."""
    if _entry(name)(call) == NO_MEMORY:
        raise MemoryError(NO_SPACE)


def checkpoint_shape(query: Tensor, value: Tensor, cu_seqlens: list[int] | None, train: bool) -> tuple[int, ...]:
    """(B, H, checkpoints, D, M): one state for every 512 tokens of a sequence but the first."""
    ends = [0, query.shape[2]] if cu_seqlens is None else cu_seqlens
    count = sum((end - begin - 1) // SEGMENT for begin, end in itertools.pairwise(ends) if end > begin)
    return query.shape[0], value.shape[1], count * train, query.shape[3], value.shape[3]


def forward(described: DeltaRuleCall, train: bool) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, max(Hq, H), T, M), the final state (B n, H, D, M), and the states that the backward pass starts from."""
    query, value = described.query, described.value
    call, keep = _inputs(described)
    B, _, T, D = query.shape
    H, M = value.shape[1], value.shape[3]
    out = output_pool.empty_rows((B, max(query.shape[1], H), T, M), value)
    final = FLOATS.new_empty(B * call.sequences, H, D, M)
    saved = FLOATS.new_empty(checkpoint_shape(query, value, described.cu_seqlens, train))
    call.out, call.state_new, call.out_stride[:] = out.data_ptr(), final.data_ptr(), out.stride()[:3]
    call.checkpoints = saved.data_ptr() if train else None
    _run("forward", call, keep)
    return out, final, saved


def backward(
    described: DeltaRuleCall, checkpoints: Tensor, grad_out: Tensor, grad_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """float32 gradients of query, key, value, beta, log_decay (empty if None) and the initial state."""
    query, key, value, log_decay = described.query, described.key, described.value, described.log_decay
    call, keep = _inputs(described)
    parts = call.parts = _entry("parts")(call)
    B, Hq, T, D = query.shape
    Hk, H, M = key.shape[1], value.shape[1], value.shape[3]
    grad_out = rows(grad_out.to(query.dtype))
    call.grad_out, call.grad_out_stride[:] = grad_out.data_ptr(), grad_out.stride()[:3]
    call.checkpoints = checkpoints.data_ptr()
    keep += [checkpoints, grad_out]
    if grad_final is not None:
        keep.append(grad_final := grad_final.contiguous())
        call.grad_state_new = grad_final.data_ptr()
    grad_query = output_pool.empty(parts * B, max(Hq, H), T, D)
    grad_key = output_pool.empty(parts * B, H, T, D)
    grad_value = output_pool.empty(B, H, T, M)
    grad_beta = FLOATS.new_empty(parts, B, H, T)
    grad_decay = FLOATS.new_empty(0) if log_decay is None else FLOATS.new_empty(parts, *log_decay.shape)
    grad_state = FLOATS.new_empty(B * call.sequences, H, D, M)
    call.grad_query, call.grad_key, call.grad_value = grad_query.data_ptr(), grad_key.data_ptr(), grad_value.data_ptr()
    call.grad_beta, call.grad_log_decay, call.grad_state = (x.data_ptr() for x in (grad_beta, grad_decay, grad_state))
    _run("backward", call, keep)
    return (
        _sum_heads(grad_query, parts, Hq),
        _sum_heads(grad_key, parts, Hk),
        grad_value,
        _sum_parts(grad_beta),
        grad_decay if log_decay is None else _sum_parts(grad_decay),
        grad_state,
    )


def _sum_parts(x: Tensor) -> Tensor:
    return x[0] if x.shape[0] == 1 else x.sum(0)


def _sum_heads(x: Tensor, parts: int, heads: int) -> Tensor:
    """(parts * B, several heads for each, T, D) -> (B, heads, T, D)."""
    x = x if parts == 1 else torch.unflatten(x, 0, (parts, x.shape[0] // parts)).sum(0)
    return x if x.shape[1] == heads else torch.unflatten(x, 1, (heads, x.shape[1] // heads)).sum(2)


@functools.lru_cache(64)
def _step_plan(
    shapes: tuple[torch.Size, torch.Size, torch.Size],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    scale: float,
    normalize_qk: bool,
) -> StepPlan:
    """What one-token calls of these shapes have in common."""
    (B, Hq, _, D), (_, Hk, _, _), (_, H, _, M) = shapes
    call = DeltaCall(batch=B, query_heads=Hq, key_heads=Hk, heads=H, tokens=1, dim=D, value_dim=M)
    call.dtype, call.normalize, call.scale = DTYPES[dtype], normalize_qk, scale
    call.query_stride[:], call.key_stride[:], call.value_stride[:] = (x[:3] for x in strides[:3])
    call.beta_stride[:] = strides[3]
    if len(strides) > 4:
        call.decay_stride[:], call.channels = strides[4][:3], len(strides[4]) == 4
    call.out_stride[:] = max(Hq, H) * M, M, M
    out_like = FLOATS.new_empty(B, max(Hq, H), 1, M, dtype=dtype)
    return StepPlan(_entry("step"), ctypes.addressof(call), call, out_like, (B, H, D, M))


def step_plan(call: DeltaRuleCall) -> StepPlan:
    """Of one-token calls like this one, whose coordinates are contiguous."""
    query, key, value, beta, log_decay, *_, scale, normalize_qk = call
    strides: tuple[tuple[int, ...], ...] = query.stride(), key.stride(), value.stride(), beta.stride()
    if log_decay is not None:
        strides = (*strides, log_decay.stride())
    return _step_plan((query.shape, key.shape, value.shape), strides, query.dtype, scale, normalize_qk)


def decode(call: DeltaRuleCall, out_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token (T = 1), without gradients: out (B, max(Hq, H), 1, M) and the new state (B, H, D, M).

    out_state: a contiguous float32 tensor that the new state is written to; it may be `state` itself.
    """
    query, key, value, beta, log_decay, mask, _, state, scale, normalize_qk = call
    query, key, value = rows(query), rows(key), rows(value)
    if log_decay is not None and log_decay.dim() == 4:
        log_decay = rows(log_decay)
    mask = None if mask is None else mask.contiguous()
    state = None if state is None else state.contiguous()
    plan = step_plan(DeltaRuleCall(query, key, value, beta, log_decay, scale=scale, normalize_qk=normalize_qk))
    final = output_pool.empty(*plan.state_shape) if out_state is None else out_state
    return plan.run(query, key, value, beta, log_decay, mask, state=state, final=final)


def delta_rule(call: DeltaRuleCall) -> tuple[Tensor, Tensor]:
    """out (B, max(Hq, H), T, M) in the dtype of query, and the final state (B n, H, D, M); differentiable."""
    given = [x for x in (*call[:5], call.state) if x is not None]
    if not eligible(*given):
        from .delta_rule_autograd import differentiable

        return differentiable(call)
    if call.query.shape[2] == 1 and call.cu_seqlens is None:
        return decode(call)
    out, final, _ = forward(call, train=False)
    return out, final
