"""A gated delta net between its projections on the native code, in one pass over the tokens: bindings of csrc/delta/layer.h."""

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import output_pool
from .bindings import check_flags
from .delta_rule import DeltaCall
from .strided import heads_first, load_layer


class DeltaLayer(Structure):
    """Mirrors struct DeltaLayer of csrc/delta/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *[(name, c_int64) for name in ("width", "channels")],
        *[(name, c_void_p) for name in ("query_filter", "key_filter", "value_filter")],
        *[(name, c_void_p) for name in ("decay_scale", "decay_bias", "gate")],
        ("gate_stride", c_int64 * 3),
        ("norm_weight", c_void_p),
        ("eps", c_float),
        ("pad", c_int32),
    ]


class LayerWeights(NamedTuple):
    """filters (width, channels): of the convolution over queries, keys and values. decay_scale, decay_bias (H): log decay =
    decay_scale softplus(a + decay_bias). norm (M), eps: of the norm of each head. All float32 and contiguous."""

    filters: Tensor
    decay_scale: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float


def delta_layer(
    mixed: Tensor, b: Tensor, a: Tensor, gate: Tensor, weights: LayerWeights, key_heads: int
) -> tuple[Tensor, Tensor]:
    """mixed (B, T, channels): queries and keys (key_heads, D each) and values (H, M) before the convolution, a sequence from
    its first token on; b, a (B, T, H); gate (B, T, H, M). All float32, the last dimensions of mixed and gate contiguous.
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
    layer.decay_scale, layer.decay_bias = weights.decay_scale.data_ptr(), weights.decay_bias.data_ptr()
    layer.gate, layer.gate_stride[:] = gate.data_ptr(), heads_first(gate)
    layer.norm_weight, layer.eps = weights.norm.data_ptr(), weights.eps
    run = load_layer(DeltaCall, DeltaLayer, "delta_layer")
    check_flags(run(ctypes.byref(call), ctypes.byref(layer)))
    del bounds
    return out, final
