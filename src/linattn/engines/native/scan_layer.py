"""Mamba-2 between its projections on the native code, in one pass over the tokens: bindings of csrc/decay/layer.h."""

import ctypes
from ctypes import Structure, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import output_pool
from .bindings import check_flags
from .decayed_sums_bindings import DecayCall
from .strided import LayerPast, address, heads_first, load_layer


class ScanLayer(Structure):
    """Mirrors struct ScanLayer of csrc/decay/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *[(name, c_int64) for name in ("width", "channels")],
        *[(name, c_void_p) for name in ("query_filter", "key_filter", "value_filter")],
        *[(name, c_void_p) for name in ("query_bias", "key_bias", "value_bias")],
        *[(name, c_void_p) for name in ("query_history", "key_history", "value_history", "A", "step_bias", "gate")],
        ("gate_stride", c_int64 * 3),
        ("squares", c_void_p),
    ]


class ScanWeights(NamedTuple):
    """filters (width, channels) and bias (channels): of the convolution over x, B and C. A, step_bias and skip (H): the log
    decay is A softplus(dt + step_bias), and skip times x is added to the output. All float32 and contiguous."""

    filters: Tensor
    bias: Tensor | None
    A: Tensor
    step_bias: Tensor
    skip: Tensor


def scan_layer(
    mixed: Tensor,
    dt: Tensor,
    gate: Tensor | None,
    weights: ScanWeights,
    heads: int,
    groups: int,
    states: int,
    past: LayerPast | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """mixed (b, T, channels): x (heads, M), B and C (groups, states) before the convolution; dt (b, T, heads); gate (b, T,
    heads, M). All float32, the last dimensions of mixed and gate contiguous; nothing wants a gradient. past: None from the
    first token on. Returns the output (b, T, heads, M), with a gate times silu(gate); the final states (b, heads,
    states, M); and with a gate the sums of squares of the output (b, heads, T)."""
    b, T, channels = mixed.shape
    shared = groups * states
    M = (channels - 2 * shared) // heads
    out, final = output_pool.empty(b, T, heads, M), output_pool.FLOATS.new_empty(b, heads, states, M)
    squares = None if gate is None else output_pool.FLOATS.new_empty(b, heads, T)
    call = DecayCall(batch=b, query_heads=groups, key_heads=groups, heads=heads, tokens=T, dim=states, value_dim=M)
    call.sequences, call.threads, call.scale = 1, torch.get_num_threads(), 1.0
    at, (batch, token, _) = mixed.data_ptr(), mixed.stride()
    call.value, call.key, call.query = at, at + 4 * heads * M, at + 4 * (heads * M + shared)
    call.value_stride[:] = batch, M, token
    call.key_stride[:] = call.query_stride[:] = batch, states, token
    bounds = (c_int64 * 2)(0, T)
    call.bounds, call.state_new, call.skip = ctypes.addressof(bounds), final.data_ptr(), weights.skip.data_ptr()
    call.out, call.out_stride[:] = out.data_ptr(), heads_first(out)
    call.input, call.input_stride[:] = dt.data_ptr(), heads_first(dt)
    layer = ScanLayer(*weights.filters.shape)
    if past is not None:
        call.state = past.state.data_ptr()
    history = None if past is None else past.history
    for name, given in (("filter", weights.filters), ("bias", weights.bias), ("history", history)):
        if given is not None:
            first = given.data_ptr()
            setattr(layer, f"value_{name}", first)
            setattr(layer, f"key_{name}", first + 4 * heads * M)
            setattr(layer, f"query_{name}", first + 4 * (heads * M + shared))
    layer.A, layer.step_bias = weights.A.data_ptr(), weights.step_bias.data_ptr()
    layer.gate, layer.squares = address(gate), address(squares)
    if gate is not None:
        layer.gate_stride[:] = heads_first(gate)
    run = load_layer(DecayCall, ScanLayer, "scan_layer")
    check_flags(run(ctypes.byref(call), ctypes.byref(layer)))
    del bounds
    return out, final, squares
