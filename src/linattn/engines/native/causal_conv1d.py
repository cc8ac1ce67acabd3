"""The causal convolution on the native code: bindings of csrc/scan, as torch operators where gradients or graphs want them."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import Structure, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.causal_conv1d.call import CausalConv1dCall
from ...ops.causal_conv1d.streams import convolve_streams
from . import output_pool
from .bindings import check_flags
from .operators import define
from .plans import eligible
from .strided import Strided, address, empty_like, fake_like, load_entries, no_second_derivative, strided

MOST_WIDTH = 8  # csrc/scan/abi.h


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ConvCall(Structure):
    """Mirrors struct ConvCall of csrc/scan/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch channels tokens width sequences threads silu", c_int64),
        ("bounds", c_void_p),
        *_fields("x out", Strided),
        *_fields("weight bias", c_void_p),
        *_fields("state state_new grad_out grad_x grad_state_new grad_state", Strided),
        *_fields("grad_weight grad_bias", c_void_p),
    ]


@functools.cache
def _entries() -> dict[str, Callable[..., int]]:
    return load_entries(ConvCall, "conv_call", ["conv", "conv_backward"])


def causal_conv1d(call: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """out (b, c, t) and the last inputs (b * n, c, w - 1), of x's dtype.

    x may be float32, float16 or bfloat16, of any strides; everything is computed in float32.
    """
    x, weight, bias, state, bounds, silu, mask = call
    weight = weight.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    state = None if state is None else state.to(x.dtype)
    if mask is not None:

        def convolve(stream: Tensor) -> Tensor:
            return _apply(CausalConv1dCall(stream, weight, bias, None, None, silu))[0]

        return convolve_streams(convolve, call._replace(state=state))
    return _apply(CausalConv1dCall(x, weight, bias, state, bounds, silu))


def _apply(call: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """Without a mask; weight and bias float32 and contiguous, the state of x's dtype."""
    if eligible(*[x for x in call[:4] if x is not None]):
        return _forward(call)
    out, last = _conv(*call[:4], list(call.ends), call.silu)
    return out, last


def _inputs(described: CausalConv1dCall, bounds: Sequence[int]) -> tuple[ConvCall, Any]:
    """The library's structure with everything that a call reads, and what must stay alive with it."""
    x, weight, bias, state, _, silu, _ = described
    call = ConvCall()
    call.batch, call.channels, call.tokens = x.shape
    call.width, call.sequences = weight.shape[1], len(bounds) - 1
    call.threads, call.silu = torch.get_num_threads(), silu
    edges = (c_int64 * len(bounds))(*bounds)
    call.bounds = ctypes.addressof(edges)
    call.x, call.weight, call.bias, call.state = strided(x), weight.data_ptr(), address(bias), strided(state)
    return call, edges


def _forward(described: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """out, last inputs."""
    x, bounds = described.x, described.ends
    out, last = empty_like(x), x.new_empty(_state_shape(x, described.weight, bounds))
    call, edges = _inputs(described, bounds)
    call.out, call.state_new = strided(out), strided(last)
    check_flags(_entries()["conv"](ctypes.byref(call)))
    del edges
    return out, last


def _state_shape(x: Tensor, weight: Tensor, bounds: Sequence[int]) -> tuple[int, int, int]:
    return x.shape[0] * (len(bounds) - 1), x.shape[1], weight.shape[1] - 1


def _backward(
    described: CausalConv1dCall, grad_out: Tensor, grad_last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x and the state in their dtype, of weight and bias in float32."""
    x, weight, bounds = described.x, described.weight, described.ends
    call, edges = _inputs(described, bounds)
    grad_x, grad_state = empty_like(x), x.new_empty(_state_shape(x, weight, bounds))
    call.grad_out, call.grad_x = strided(grad_out), strided(grad_x)
    call.grad_state_new, call.grad_state = strided(grad_last), strided(grad_state)
    grad_weight = output_pool.FLOATS.new_empty(x.shape[0], *weight.shape)
    grad_bias = output_pool.FLOATS.new_empty(x.shape[0], weight.shape[0])
    call.grad_weight, call.grad_bias = grad_weight.data_ptr(), grad_bias.data_ptr()
    check_flags(_entries()["conv_backward"](ctypes.byref(call)))
    del edges
    return grad_x, grad_weight.sum(0), grad_bias.sum(0), grad_state


# The fields of a CausalConv1dCall without its mask.
_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? state, int[] bounds, bool silu"
_conv = define("causal_conv1d", lambda *flat: _forward(CausalConv1dCall(*flat)), f"({_INPUTS}) -> (Tensor, Tensor)")
_conv_backward = define(
    "causal_conv1d_backward",
    lambda *flat: _backward(CausalConv1dCall(*flat[:-2]), *flat[-2:]),
    f"({_INPUTS}, Tensor grad_out, Tensor? grad_last) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _fake(x: Tensor, weight: Tensor, bias: Any, state: Any, bounds: list[int], silu: bool) -> tuple[Tensor, ...]:
    return fake_like(x), x.new_empty(_state_shape(x, weight, bounds))


def _fake_backward(x: Tensor, weight: Tensor, bias: Any, state: Any, bounds: list[int], *_: Any) -> tuple[Tensor, ...]:
    state_like = x.new_empty(_state_shape(x, weight, bounds))
    return fake_like(x), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0]), state_like


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, state, ctx.bounds, ctx.silu = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, state)


def _gradients(ctx: Any, grad_out: Tensor | None, grad_last: Tensor | None) -> Any:
    x, weight, bias, state = ctx.saved_tensors
    grad_out = torch.zeros_like(x) if grad_out is None else grad_out
    found = _conv_backward(x, weight, bias, state, ctx.bounds, ctx.silu, grad_out, grad_last)
    grad_x, grad_weight, grad_bias, grad_state = found
    return grad_x, grad_weight, None if bias is None else grad_bias, None if state is None else grad_state, None, None


_conv.register_fake(_fake)
_conv_backward.register_fake(_fake_backward)
_conv.register_autograd(_gradients, setup_context=_context)
_conv_backward.register_autograd(no_second_derivative)
