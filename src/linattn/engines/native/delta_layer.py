"""A gated delta net between its projections on the native code, in one pass over the tokens: bindings of csrc/delta/layer.h."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import output_pool
from .bindings import check_flags
from .delta_rule import DeltaCall
from .ffi import NO_MEMORY
from .strided import LayerPast, address, heads_first, load_entries, load_layer


class DeltaLayer(Structure):
    """Mirrors struct DeltaLayer of csrc/delta/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *[(name, c_int64) for name in ("width", "channels")],
        *[(name, c_void_p) for name in ("query_filter", "key_filter", "value_filter")],
        *[(name, c_void_p) for name in ("query_history", "key_history", "value_history")],
        *[(name, c_void_p) for name in ("decay_scale", "decay_bias", "gate")],
        ("gate_stride", c_int64 * 3),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("pad", c_int32),
    ]


class DeltaLayerStep(Structure):
    """Mirrors struct DeltaLayerStep of csrc/delta/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *[(name, c_int64) for name in ("batch", "key_heads", "heads", "dim", "value_dim", "threads", "width", "held")],
        *[(name, c_int64) for name in ("mixed_stride", "gate_stride")],
        ("ba_stride", c_int64 * 3),
        ("conv_stride", c_int64 * 2),
        *[(name, c_float) for name in ("scale", "eps")],
        *[(name, c_void_p) for name in ("mixed", "b", "a", "gate", "filter", "filter_bias", "A_log", "dt_bias")],
        *[(name, c_void_p) for name in ("norm_weight", "conv_state", "state", "out")],
    ]


class StepWeights(NamedTuple):
    """filters (channels, width) and their bias (channels) or None: of the convolution. A_log, dt_bias (H): log decay =
    -exp(A_log) softplus(a + dt_bias). norm (M), eps: of the norm of each head. All float32 and contiguous."""

    filters: Tensor
    filter_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class LayerWeights(NamedTuple):
    """filters (width, channels): of the convolution over queries, keys and values. decay_scale, decay_bias (H): log decay =
    decay_scale softplus(a + decay_bias). norm (M), eps: of the norm of each head. All float32 and contiguous."""

    filters: Tensor
    decay_scale: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float


def delta_layer(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    gate: Tensor,
    weights: LayerWeights,
    key_heads: int,
    past: LayerPast | None = None,
) -> tuple[Tensor, Tensor]:
    """mixed (B, T, channels): queries and keys (key_heads, D each) and values (H, M) before the convolution; b, a (B, T, H);
    gate (B, T, H, M). All float32, the last dimensions of mixed and gate contiguous. past: None from the first token on.
    Returns norm(rule) silu(gate), (B, T, H, M), and the final state. Nothing wants a gradient."""
    B, T, channels = mixed.shape
    H, M = gate.shape[2:]
    D = (channels - H * M) // (2 * key_heads)
    out, final = output_pool.empty(B, T, H, M), output_pool.FLOATS.new_empty(B, H, D, M)
    call = DeltaCall(batch=B, query_heads=key_heads, key_heads=key_heads, heads=H, tokens=T, dim=D, value_dim=M)
    call.sequences, call.threads, call.normalize, call.scale = 1, torch.get_num_threads(), True, D**-0.5
    at, (batch, token, _) = mixed.data_ptr(), mixed.stride()
    call.query, call.key, call.value = at, at + 4 * key_heads * D, at + 8 * key_heads * D
    call.query_stride[:] = call.key_stride[:] = batch, D, token
    call.value_stride[:] = batch, M, token
    call.beta, call.log_decay = b.data_ptr(), a.data_ptr()
    call.beta_stride[:], call.decay_stride[:] = heads_first(b), heads_first(a)
    bounds = (c_int64 * 2)(0, T)
    call.bounds, call.state_new = ctypes.addressof(bounds), final.data_ptr()
    call.out, call.out_stride[:] = out.data_ptr(), heads_first(out)
    layer, filters = DeltaLayer(*weights.filters.shape), weights.filters.data_ptr()
    layer.query_filter, layer.key_filter = filters, filters + 4 * key_heads * D
    layer.value_filter = filters + 8 * key_heads * D
    if past is not None:
        history, call.state = past.history.data_ptr(), past.state.data_ptr()
        layer.query_history, layer.key_history = history, history + 4 * key_heads * D
        layer.value_history = history + 8 * key_heads * D
    layer.decay_scale, layer.decay_bias = weights.decay_scale.data_ptr(), weights.decay_bias.data_ptr()
    layer.gate, layer.gate_stride[:] = gate.data_ptr(), heads_first(gate)
    layer.norm_weight, layer.eps = weights.norm.data_ptr(), weights.eps
    run = load_layer(DeltaCall, DeltaLayer, "delta_layer")
    check_flags(run(ctypes.byref(call), ctypes.byref(layer)))
    del bounds
    return out, final


@functools.cache
def _step() -> Callable[..., int]:
    return load_entries(DeltaLayerStep, "delta_layer_step", ["delta_layer_step"])["delta_layer_step"]


def delta_layer_step(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    gate: Tensor,
    weights: StepWeights,
    key_heads: int,
    conv_state: Tensor,
    state: Tensor,
) -> Tensor:
    """One token after others: norm(rule) silu(gate), (B, H M). conv_state and state move on, in place.

    mixed (B, channels) as in delta_layer; b, a (B, key_heads, H / key_heads) of the same strides; gate (B, H M); conv_state
    (B, channels, inputs held); state (B, H, D, M), contiguous. All float32; mixed, gate and conv_state are contiguous in their
    last dimension. Nothing wants a gradient.
    """
    B, H, D, M = state.shape
    out = mixed.new_empty(B, H * M)
    sizes = B, key_heads, H, D, M, torch.get_num_threads(), weights.filters.shape[1], conv_state.shape[2]
    strides = mixed.stride(0), gate.stride(0), b.stride(), conv_state.stride()[:2]
    given = mixed, b, a, gate, *weights[:5], conv_state, state, out
    call = DeltaLayerStep(*sizes, *strides, D**-0.5, weights.eps, *[address(x) for x in given])
    flags = _step()(call)
    check_flags(flags & NO_MEMORY)  # the output of a token that is not finite is NaN
    return out
