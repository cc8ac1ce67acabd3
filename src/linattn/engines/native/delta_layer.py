"""A layer of the delta rule between its projections on the native code: bindings of csrc/delta/layer.h, which goes over the
tokens of a prompt in one pass, and of layer_step.h, for one token."""

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
        *[(name, c_float) for name in ("eps", "decay_bound")],
        *[(name, c_int32) for name in ("sigmoid", "pad")],
    ]


class DeltaLayerStep(Structure):
    """Mirrors struct DeltaLayerStep of csrc/delta/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *[(name, c_int64) for name in ("batch", "key_heads", "heads", "dim", "value_dim", "threads", "width", "held")],
        *[(name, c_int64) for name in ("mixed_stride", "gate_stride")],
        *[(name, c_int64 * 3) for name in ("b_stride", "a_stride")],
        ("conv_stride", c_int64 * 2),
        *[(name, c_int32) for name in ("channels", "sigmoid")],
        *[(name, c_float) for name in ("scale", "eps", "decay_bound")],
        ("pad", c_int32),
        *[(name, c_void_p) for name in ("query", "key", "value", "b", "a", "gate", "filter", "filter_bias")],
        *[(name, c_void_p) for name in ("A_log", "dt_bias", "norm_weight", "conv_state", "state", "out")],
    ]


class StepWeights(NamedTuple):
    """filters (channels, width) and their bias (channels) or None: of the convolution. A_log (H) and dt_bias (H) or (H, D): log
    decay = -exp(A_log) softplus(a + dt_bias), or bound sigmoid(exp(A_log) (a + dt_bias)) where bound is not 0. norm (M), eps:
    of the norm of each head. All float32 and contiguous. sigmoid: the activation of the gate, else silu."""

    filters: Tensor
    filter_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    bound: float = 0.0
    sigmoid: bool = False


class LayerWeights(NamedTuple):
    """filters (width, channels): of the convolution over queries, keys and values. decay_scale (H), decay_bias (H) or (H, D):
    log decay = decay_scale softplus(a + decay_bias), or bound sigmoid(-decay_scale (a + decay_bias)) where bound is not 0. norm
    (M), eps: of the norm of each head. All float32 and contiguous. sigmoid: the activation of the gate, else silu."""

    filters: Tensor
    decay_scale: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float
    bound: float = 0.0
    sigmoid: bool = False


Rows = Tensor | tuple[Tensor, Tensor, Tensor]  # queries, keys and values: side by side in one tensor, or three


def _three(mixed: Rows, keys: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where queries, keys and values begin, and the strides that they share. keys: channels of the queries, and of the keys."""
    if isinstance(mixed, Tensor):
        at = mixed.data_ptr()
        return (at, at + 4 * keys, at + 8 * keys), mixed.stride()
    return tuple(x.data_ptr() for x in mixed), mixed[0].stride()


Shapes = list[tuple[Tensor | None, tuple[int, ...]]]  # tensors, and what their shapes must be


def _check(mixed: Rows, lead: tuple[int, ...], keys: int, values: int, others: Shapes) -> None:
    """Raises a ValueError unless the rows (*lead, channels) and the other tensors have the shapes that the library reads."""
    parts, sizes = ([mixed], [2 * keys + values]) if isinstance(mixed, Tensor) else (mixed, [keys, keys, values])
    for x, shape in [*((x, (*lead, size)) for x, size in zip(parts, sizes, strict=True)), *others]:
        if x is not None and x.shape != shape:
            raise ValueError(f"a layer of the delta rule needs a tensor of shape {shape}, got {tuple(x.shape)}.")
    if any(x.stride() != parts[0].stride() for x in parts[1:]):
        raise ValueError("queries, keys and values of a layer must have the same strides.")


def delta_layer(
    mixed: Rows,
    b: Tensor,
    a: Tensor,
    gate: Tensor,
    weights: LayerWeights,
    key_heads: int,
    past: LayerPast | None = None,
) -> tuple[Tensor, Tensor]:
    """mixed (B, T, channels): queries and keys (key_heads, D each) and values (H, M) before the convolution, or these three; b
    (B, T, H); a (B, T, H), or (B, T, H, D) for a decay of each channel; gate (B, T, H, M). All float32, the last dimensions of
    mixed, gate and a decay of channels contiguous. past: None from the first token on. Returns norm(rule) act(gate), (B, T, H,
    M), and the final state. Nothing wants a gradient."""
    B, T, H, M = gate.shape
    width, channels = weights.filters.shape
    D = (channels - H * M) // (2 * key_heads)
    keys, decays = key_heads * D, (H, D) if a.dim() == 4 else (H,)
    shapes: Shapes = [(b, (B, T, H // key_heads * key_heads)), (a, (B, T, *decays)), (weights.norm, (M,))]
    shapes += [(weights.filters, (width, 2 * keys + H * M)), (weights.decay_scale, (H,)), (weights.decay_bias, decays)]
    if past is not None:
        shapes += [(past.history, (B, width - 1, channels)), (past.state, (B, H, D, M))]
    _check(mixed, (B, T), keys, H * M, shapes)
    out, final = output_pool.empty(B, T, H, M), output_pool.FLOATS.new_empty(B, H, D, M)
    call = DeltaCall(batch=B, query_heads=key_heads, key_heads=key_heads, heads=H, tokens=T, dim=D, value_dim=M)
    call.sequences, call.threads, call.normalize, call.scale = 1, torch.get_num_threads(), True, D**-0.5
    (call.query, call.key, call.value), (batch, token, _) = _three(mixed, keys)
    call.query_stride[:] = call.key_stride[:] = batch, D, token
    call.value_stride[:] = batch, M, token
    call.beta, call.log_decay, call.channels = b.data_ptr(), a.data_ptr(), a.dim() == 4
    call.beta_stride[:], call.decay_stride[:] = heads_first(b), heads_first(a)
    bounds = (c_int64 * 2)(0, T)
    call.bounds, call.state_new = ctypes.addressof(bounds), final.data_ptr()
    call.out, call.out_stride[:] = out.data_ptr(), heads_first(out)
    layer = DeltaLayer(width, channels)
    (layer.query_filter, layer.key_filter, layer.value_filter), _ = _three(weights.filters, keys)
    if past is not None:
        (layer.query_history, layer.key_history, layer.value_history), _ = _three(past.history, keys)
        call.state = past.state.data_ptr()
    layer.decay_scale, layer.decay_bias = weights.decay_scale.data_ptr(), weights.decay_bias.data_ptr()
    layer.gate, layer.gate_stride[:] = gate.data_ptr(), heads_first(gate)
    layer.norm_weight, layer.eps = weights.norm.data_ptr(), weights.eps
    layer.decay_bound, layer.sigmoid = weights.bound, weights.sigmoid
    run = load_layer(DeltaCall, DeltaLayer, "delta_layer")
    check_flags(run(ctypes.byref(call), ctypes.byref(layer)))
    del bounds
    return out, final


@functools.cache
def _step() -> Callable[..., int]:
    return load_entries(DeltaLayerStep, "delta_layer_step", ["delta_layer_step"])["delta_layer_step"]


def delta_layer_step(
    mixed: Rows,
    b: Tensor,
    a: Tensor,
    gate: Tensor,
    weights: StepWeights,
    key_heads: int,
    conv_state: Tensor,
    state: Tensor,
) -> Tensor:
    """One token after others: norm(rule) act(gate), (B, H M). conv_state and state move on, in place.

    mixed (B, channels), or three, as in delta_layer; b (B, key_heads, H / key_heads); a like b, or with a last dimension D for
    a decay of each channel; gate (B, H M); conv_state (B, channels, inputs held, at least width - 1); state (B, H, D, M),
    contiguous. All float32; mixed, gate, conv_state and a decay of channels are contiguous in their last dimension. Nothing
    wants a gradient.
    """
    B, H, D, M = state.shape
    (channels, width), held, keys = weights.filters.shape, conv_state.shape[2], key_heads * D
    heads = B, key_heads, H // key_heads
    decays = (D,) if a.dim() == 4 else ()
    shapes: Shapes = [(b, heads), (a, (*heads, *decays)), (gate, (B, H * M))]
    shapes += [(weights.filters, (2 * keys + H * M, width)), (weights.filter_bias, (channels,)), (weights.A_log, (H,))]
    shapes += [
        (state, (B, key_heads * heads[2], D, M)),
        (weights.dt_bias, (H, *decays)),
        (weights.norm, (M,)),
        (conv_state, (B, channels, max(held, width - 1))),
    ]
    _check(mixed, (B,), keys, H * M, shapes)
    out = gate.new_empty(B, H * M)
    sizes = B, key_heads, H, D, M, torch.get_num_threads(), width, held
    three, (row, _) = _three(mixed, keys)
    strides = row, gate.stride(0), b.stride(), a.stride()[:3], conv_state.stride()[:2]
    numbers = len(decays), weights.sigmoid, D**-0.5, weights.eps, weights.bound, 0
    given = b, a, gate, *weights[:5], conv_state, state, out
    call = DeltaLayerStep(*sizes, *strides, *numbers, *three, *[address(x) for x in given])
    flags = _step()(call)
    check_flags(flags & NO_MEMORY)  # the output of a token that is not finite is NaN
    return out
