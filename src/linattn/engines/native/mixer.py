"""The steps around an update rule on the native code: gated norms, projections, one token of a convolution and of Mamba-2.

Bindings of csrc/mixer. Callers have checked shapes, dtypes and that nothing wants a gradient.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import output_pool
from .bindings import DTYPES, check_flags
from .ffi import library
from .strided import address, load_entries


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class NormCall(Structure):
    """Mirrors struct NormCall of csrc/mixer/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("rows size groups threads per_token", c_int64),
        *_fields("x_stride gate_stride", c_int64 * 2),
        *_fields("dtype gate_first sigmoid wide_weight", c_int32),
        ("eps", c_float),
        ("pad", c_int32),
        *_fields("x gate weight out", c_void_p),
    ]


class ConvStep(Structure):
    """Mirrors struct ConvStep of csrc/mixer/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch channels width held", c_int64),
        *_fields("x_stride state_stride", c_int64 * 2),
        *_fields("dtype silu", c_int32),
        *_fields("x state out weight bias", c_void_p),
    ]


class SsdStep(Structure):
    """Mirrors struct SsdStep of csrc/mixer/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch heads groups dim states threads softplus", c_int64),
        *_fields("x_stride dt_stride B_stride C_stride z_stride", c_int64 * 2),
        *_fields("state x dt B C z A D bias out", c_void_p),
    ]


class ProjectCall(Structure):
    """Mirrors struct ProjectCall of csrc/mixer/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("rows inputs outputs threads dtype x_stride", c_int64),
        *_fields("x weight bias out order row_scale input_scale", c_void_p),
    ]


@functools.cache
def _projects() -> dict[str, Callable[..., int]]:
    return load_entries(ProjectCall, "project_call", ["project", "project_many"])


@functools.cache
def _norm() -> Callable[..., int]:
    return load_entries(NormCall, "norm_call", ["gated_norm"])["gated_norm"]


@functools.cache
def _conv() -> Callable[..., int]:
    return load_entries(ConvStep, "conv_step", ["conv_step"])["conv_step"]


@functools.cache
def _ssd() -> Callable[..., int]:
    return load_entries(SsdStep, "ssd_step", ["ssd_step"])["ssd_step"]


def gated_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    groups: int = 1,
    gate_first: bool = False,
    sigmoid: bool = False,
    wide_weight: bool = False,
) -> Tensor:
    """x and gate (..., heads, size) of one dtype, contiguous in size; weight (size) float32 -> contiguous, of x's dtype.

    The mean of squares is taken within `groups` equal parts of size. wide_weight: in half precision the weight multiplies
    before the norm is rounded.
    """
    size = x.shape[-1]
    if x.dtype is torch.float32 and x.dim() <= 4:
        out = output_pool.empty(*x.shape)
    else:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = NormCall(out.numel() // size if size else 0, size, groups, torch.get_num_threads())
    x, call.per_token, call.x_stride[0], call.x_stride[1] = _as_rows(x)
    if gate is not None:
        gate, per_token, call.gate_stride[0], call.gate_stride[1] = _as_rows(gate)
        if per_token != call.per_token:  # one of them can only be read as contiguous rows
            x, gate = x.contiguous(), gate.contiguous()
            call.per_token, call.x_stride[0], call.gate_stride[0] = 1, size, size
        call.gate = gate.data_ptr()
    call.dtype, call.gate_first, call.sigmoid, call.wide_weight = DTYPES[x.dtype], gate_first, sigmoid, wide_weight
    call.eps, call.x, call.weight, call.out = eps, x.data_ptr(), address(weight), out.data_ptr()
    check_flags(_norm()(ctypes.byref(call)))
    return out


def _as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x, its rows per token, and the strides between tokens and between the rows of one; a copy where x has no such form."""
    size = x.shape[-1]
    if x.is_contiguous():
        return x, x.shape[-2] if x.dim() > 1 else 1, (x.shape[-2] if x.dim() > 1 else 1) * size, size
    if x.dim() >= 2 and x.stride(-1) == 1:
        heads, outer = x.shape[-2], x.stride(-3) if x.dim() > 2 else 0
        lead = list(zip(x.shape[:-2], x.stride()[:-2], strict=True))
        regular = all(n == 1 or stride == lead[i + 1][1] * lead[i + 1][0] for i, (n, stride) in enumerate(lead[:-1]))
        if regular:
            return x, heads, outer, x.stride(-2)
    return _as_rows(x.contiguous())


def conv_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """x (B, C), state (B, C, held) of one dtype, contiguous in held: moves on by one. weight (C, width), bias (C) float32."""
    B, C = x.shape
    out = x.new_empty(B, C)
    call = ConvStep(B, C, weight.shape[1], state.shape[2])
    call.x_stride[:], call.state_stride[:] = x.stride(), state.stride()[:2]
    call.dtype, call.silu = DTYPES[x.dtype], silu
    call.x, call.state, call.out = x.data_ptr(), state.data_ptr(), out.data_ptr()
    call.weight, call.bias = weight.data_ptr(), address(bias)
    check_flags(_conv()(ctypes.byref(call)))
    return out


def ssd_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    *,
    softplus: bool,
) -> Tensor:
    """state (b, heads, dim, n), updated in place; x and z (b, heads, dim), dt (b, heads), A, D and bias (heads), B and C
    (b, groups, n): all float32, the last dimensions contiguous. Returns (b, heads, dim)."""
    b, heads, dim, states = state.shape
    out = x.new_empty(b, heads, dim)
    call = SsdStep(b, heads, B.shape[1], dim, states, torch.get_num_threads(), softplus)
    call.x_stride[:], call.dt_stride[:] = x.stride()[:2], dt.stride()
    call.B_stride[:], call.C_stride[:] = B.stride()[:2], C.stride()[:2]
    if z is not None:
        call.z_stride[:], call.z = z.stride()[:2], z.data_ptr()
    call.state, call.x, call.dt, call.B, call.C = (y.data_ptr() for y in (state, x, dt, B, C))
    call.A, call.D, call.bias, call.out = A.data_ptr(), address(D), address(bias), out.data_ptr()
    check_flags(_ssd()(ctypes.byref(call)))
    return out


def project(x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor | None = None) -> Tensor:
    """x (rows, inputs) float32; weight (outputs, inputs) float32 or bfloat16, contiguous; bias (outputs) float32, contiguous
    -> (rows, outputs) float32. For a few rows: the weights are read once.

    order: which row of weight each output is made with, (outputs) int64, contiguous; all rows in their order if None.
    """
    outputs = (weight if order is None else order).shape[0]
    return _run_project("project", x, weight, bias, x.new_empty(x.shape[0], outputs), (order, None, None))


def project_many(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor | None = None,
    *,
    row_scale: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """As project, with float32 weights, for hundreds of rows: a block of the weights is reordered first, and stays in cache.

    order: as in project. row_scale (rows), input_scale (inputs): float32, contiguous, multiply x first.
    """
    outputs = (weight if order is None else order).shape[0]
    out = output_pool.empty(x.shape[0], outputs)
    return _run_project("project_many", x, weight, bias, out, (order, row_scale, input_scale))


def project_many_wins() -> bool:
    """Whether project_many is faster than torch's product on this processor, as far as it was measured."""
    return bool(library._library.linattn_project_many_wins())


def _run_project(
    entry: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    options: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    call = ProjectCall(*x.shape, out.shape[1], torch.get_num_threads(), DTYPES[weight.dtype], x.stride(0))
    call.x, call.weight, call.bias, call.out = x.data_ptr(), weight.data_ptr(), address(bias), out.data_ptr()
    call.order, call.row_scale, call.input_scale = (address(x) for x in options)
    check_flags(_projects()[entry](ctypes.byref(call)))
    return out
