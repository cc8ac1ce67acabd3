"""Sums with decay, without a denominator: S <- exp(g_t) S + k_t v_t^T, out_t = scale q_t^T S.

Retention, lightning attention, simple GLA and Mamba-2's SSD have one decay for each head and token, GLA one for each row
of S. Callers have checked the shapes of a DecayedSumsCall: Hk divides H, and Hq divides H or is a multiple of it. The output
has Ho = max(Hq, H) heads. decayed_sums.py has the differentiable function.
"""

import ctypes
import functools
import itertools
from collections.abc import Callable
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.decayed_sums.call import DecayedSumsCall
from .bindings import DTYPES, rows
from .ffi import NO_MEMORY, OTHER_VERSION, library
from .output_pool import FLOATS, empty_rows
from .output_pool import empty as pooled_empty
from .step_plan import NO_SPACE, StepPlan

SEGMENT = 256  # tokens between the states that training keeps: D M / 256 numbers for each token and head
MOST_PLANS = 256  # shapes of one-token calls that are remembered


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class DecayCall(Structure):
    """Mirrors struct DecayCall of csrc/decay/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch query_heads key_heads heads tokens dim value_dim sequences threads segment", c_int64),
        *_fields("dtype per_channel", c_int32),
        ("scale", c_float),
        ("pad", c_int32),
        *_fields("query key value", c_void_p),
        *_fields("query_stride key_stride value_stride", c_int64 * 3),
        ("log_decay", c_void_p),
        ("decay_stride", c_int64 * 3),
        *_fields("mask bounds state state_new out", c_void_p),
        ("out_stride", c_int64 * 3),
        *_fields("checkpoints input skip", c_void_p),
        ("input_stride", c_int64 * 3),
        ("grad_out", c_void_p),
        ("grad_out_stride", c_int64 * 3),
        *_fields("grad_state_new grad_query grad_key grad_value grad_log_decay grad_state", c_void_p),
    ]


def available() -> bool:
    """Whether the native library is loaded and has the decayed sums."""
    return library.why_not is None and hasattr(library._library, "linattn_decay_call_size")


@functools.cache
def _entry(name: str) -> Callable[..., int]:
    """linattn_decay_<name> of the library."""
    if library.why_not is not None:
        raise RuntimeError(f"the native engine is not available: {library.why_not}.")
    size = library._library.linattn_decay_call_size
    size.restype = c_int64
    if size() != ctypes.sizeof(DecayCall):
        raise RuntimeError(f"the native engine is not available: {OTHER_VERSION}.")
    entry: Any = getattr(library._library, f"linattn_decay_{name}")
    entry.restype = c_int32
    entry.argtypes = [c_void_p] * 10 + [c_int64] if name == "decode" else [ctypes.POINTER(DecayCall)]
    return entry


def run(name: str, call: DecayCall) -> None:
    """Calls an entry of the library, on as many threads as torch has."""
    entry = _entry(name)
    call.threads = torch.get_num_threads()
    if entry(ctypes.byref(call)) & NO_MEMORY:
        raise MemoryError(NO_SPACE)


def segment_count(bounds: list[int]) -> int:
    """Checkpoints of one batch entry."""
    return sum((end - begin + SEGMENT - 1) // SEGMENT for begin, end in itertools.pairwise(bounds))


def _strides(x: Tensor) -> Any:
    return (c_int64 * 3)(*x.stride()[:3])


class Inputs:
    """The tensors of a call in the form the library takes, and the structure that points at them."""

    def __init__(self, described: DecayedSumsCall) -> None:
        query, key, value, log_decay, mask, cu_seqlens, state, scale = described
        query, key, value = rows(query), rows(key), rows(value)
        bounds = [0, key.shape[2]] if cu_seqlens is None else cu_seqlens
        self.sequences = len(bounds) - 1
        self.state_shape = (key.shape[0] * self.sequences, value.shape[1], key.shape[3], value.shape[3])
        self.out_shape = (query.shape[0], max(query.shape[1], value.shape[1]), query.shape[2], value.shape[3])
        call = self.call = DecayCall()
        call.batch, call.query_heads, call.tokens, call.dim = query.shape
        call.key_heads, call.heads, call.value_dim = key.shape[1], value.shape[1], value.shape[3]
        call.sequences = self.sequences
        call.dtype, call.scale = DTYPES[query.dtype], scale
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.query_stride, call.key_stride, call.value_stride = _strides(query), _strides(key), _strides(value)
        array = (c_int64 * len(bounds))(*bounds)
        call.bounds = ctypes.addressof(array)
        self.keep: list[Any] = [query, key, value, array]
        self.checkpoint_shape = (query.shape[0], segment_count(bounds), *self.state_shape[1:])
        if log_decay is not None:
            log_decay = log_decay if log_decay.dim() == 3 else rows(log_decay)
            call.log_decay, call.per_channel = log_decay.data_ptr(), int(log_decay.dim() == 4)
            call.decay_stride = _strides(log_decay)
        if mask is not None:
            mask = mask.contiguous()
            call.mask = mask.data_ptr()
        if state is not None:
            state = state.contiguous()
            call.state = state.data_ptr()
        self.keep += [log_decay, mask, state]

    def set_out(self, out: Tensor) -> None:
        self.call.out, self.call.out_stride = out.data_ptr(), _strides(out)


def forward(
    described: DecayedSumsCall, train: bool, step: Tensor | None = None, skip: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output rows, final state, and with `train` the states that the backward pass starts from, else an empty tensor.

    Mamba-2's, without gradients: values are multiplied by step (B, H, T), and skip (H) times the value itself is added to the
    output. Both float32; log_decay must be (B, H, T) then.
    """
    inputs = Inputs(described)
    call = inputs.call
    if step is not None:
        call.input, call.input_stride = step.data_ptr(), _strides(step)
    if skip is not None:
        call.skip = skip.data_ptr()
    out, final = empty_rows(inputs.out_shape, described.value), FLOATS.new_empty(inputs.state_shape)
    checkpoints = FLOATS.new_empty(inputs.checkpoint_shape if train else (0,))
    inputs.set_out(out)
    call.state_new = final.data_ptr()
    if train:
        call.segment, call.checkpoints = SEGMENT, checkpoints.data_ptr()
    run("forward", call)
    return out, final, checkpoints


def backward(
    described: DecayedSumsCall, checkpoints: Tensor, grad_out: Tensor, grad_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Float32 gradients of query, key, value, log_decay (empty without one) and initial state."""
    log_decay = described.log_decay
    inputs = Inputs(described)
    call = inputs.call
    grad_out = rows(grad_out)
    call.segment, call.checkpoints = SEGMENT, checkpoints.data_ptr()
    call.grad_out, call.grad_out_stride = grad_out.data_ptr(), _strides(grad_out)
    if grad_final is not None:
        grad_final = grad_final.contiguous()
        call.grad_state_new = grad_final.data_ptr()
    grads = [pooled_empty(*x.shape) for x in described[:3]]
    grad_decay = FLOATS.new_empty((0,) if log_decay is None else log_decay.shape)
    grad_state = FLOATS.new_empty(inputs.state_shape)
    call.grad_query, call.grad_key, call.grad_value = [x.data_ptr() for x in grads]
    call.grad_log_decay = None if log_decay is None else grad_decay.data_ptr()
    call.grad_state = grad_state.data_ptr()
    run("backward", call)
    return grads[0], grads[1], grads[2], grad_decay, grad_state


_plans: dict[tuple[object, ...], StepPlan] = {}


def step_plan(call: DecayedSumsCall) -> StepPlan:
    """Of one-token calls like this one, whose coordinates are contiguous."""
    tokens, log_decay = call[:3], call.log_decay
    decay = None if log_decay is None else (log_decay.dim(), log_decay.stride())
    name = (*(x.shape for x in tokens), *(x.stride() for x in tokens), decay, call.query.dtype, call.scale)
    plan = _plans.get(name)
    if plan is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        inputs = Inputs(DecayedSumsCall(*tokens, log_decay, scale=call.scale))
        out_like = FLOATS.new_empty(inputs.out_shape, dtype=call.query.dtype)
        inputs.set_out(out_like)
        at, bounds = ctypes.addressof(inputs.call), inputs.keep[3]
        plan = StepPlan(_entry("decode"), at, inputs.call, out_like, inputs.state_shape, bounds)
        _plans[name] = plan
    return plan


def decode(call: DecayedSumsCall, out_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token (T = 1) without gradients: output (B, Ho, 1, M) and the new state, written to `out_state` if that is given.

    `out_state` may be `state` itself, which is then updated in place; it must be contiguous.
    """
    query, key, value, log_decay, mask, _, state, scale = call
    query, key, value = rows(query), rows(key), rows(value)
    if log_decay is not None and log_decay.dim() == 4:
        log_decay = rows(log_decay)
    plan = step_plan(DecayedSumsCall(query, key, value, log_decay, scale=scale))
    final = FLOATS.new_empty(plan.state_shape) if out_state is None else out_state
    if final.shape != plan.state_shape or not final.is_contiguous() or final.dtype is not torch.float32:
        expected = f"a contiguous float32 tensor of shape {plan.state_shape}"
        raise ValueError(f"out_state is {final.dtype} of shape {tuple(final.shape)}; it must be {expected}")
    if state is not None and not state.is_contiguous():
        state = state.contiguous()
    if mask is not None and not mask.is_contiguous():
        mask = mask.contiguous()
    return plan.run(query, key, value, log_decay, mask, state=state, final=final)
