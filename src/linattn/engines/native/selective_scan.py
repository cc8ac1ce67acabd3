"""The selective scan on the native code: bindings of csrc/scan, as torch operators where gradients or graphs want them."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import Structure, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.selective_scan.call import SelectiveScanCall
from . import output_pool
from .bindings import check_flags
from .operators import define_call
from .plans import eligible
from .strided import (
    Strided,
    address,
    empty_like,
    fake_like,
    load_entries,
    no_second_derivative,
    readable,
    strided,
)

SEGMENT = 64  # tokens between checkpoints: csrc/scan/abi.h
MOST_PARTS = 16  # sums of the gradients of B and C that are kept apart, for threads


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ScanCall(Structure):
    """Mirrors struct ScanCall of csrc/scan/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch channels groups states tokens threads softplus parts", c_int64),
        *_fields("u delta z B C out", Strided),
        *_fields("A D bias state state_new checkpoints", c_void_p),
        ("grad_out", Strided),
        ("grad_state_new", c_void_p),
        *_fields("grad_u grad_delta grad_z", Strided),
        *_fields("grad_A grad_D grad_bias grad_B grad_C grad_state", c_void_p),
    ]


@functools.cache
def _entries() -> dict[str, Callable[..., int]]:
    return load_entries(ScanCall, "scan_call", ["scan", "scan_step", "scan_backward"])


def selective_scan(call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    """out (b, c, t) of u's dtype and the last state (b, c, n) in float32.

    u, delta, z, B and C may be float32, float16 or bfloat16, of any strides; everything is computed in float32.
    """
    call = _readable(call)
    given = [x for x in call[:9] if x is not None]
    if eligible(*given):
        out, last, _ = _forward(call, False)
        return out, last
    train = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    out, last, _ = _scan(*call, train)
    return out, last


def decode(call: SelectiveScanCall, out_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token, without gradients. out_state: takes the new state, and may be `state` itself; float32, contiguous."""
    out, last, _ = _forward(_readable(call), False, out_state)
    return out, last


def _readable(call: SelectiveScanCall) -> SelectiveScanCall:
    """Tokens of dtypes that the library reads, everything else float32 and contiguous."""
    u, delta, A, B, C, D, z, delta_bias, state, delta_softplus = call
    delta, B, C, z = readable(delta), readable(B), readable(C), None if z is None else readable(z)
    A, D, delta_bias, state = A.float().contiguous(), _float32(D), _float32(delta_bias), _float32(state)
    return SelectiveScanCall(u, delta, A, B, C, D, z, delta_bias, state, delta_softplus)


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _inputs(described: SelectiveScanCall) -> ScanCall:
    """The library's structure with everything that a call reads."""
    u, delta, A, B, C, D, z, delta_bias, state, delta_softplus = described
    call = ScanCall()
    call.batch, call.channels, call.tokens = u.shape
    call.groups, call.states = B.shape[1], B.shape[2]
    call.threads, call.softplus = torch.get_num_threads(), delta_softplus
    call.u, call.delta, call.z = strided(u), strided(delta), strided(z)
    call.B, call.C = strided(B), strided(C)
    call.A, call.D, call.bias, call.state = A.data_ptr(), address(D), address(delta_bias), address(state)
    return call


def _forward(
    described: SelectiveScanCall, train: bool, out_state: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, last state, checkpoints (empty without `train`)."""
    u, A = described.u, described.A
    b, c, t = u.shape
    out = empty_like(u)
    last = output_pool.FLOATS.new_empty(b, c, A.shape[1]) if out_state is None else out_state
    checkpoints = output_pool.empty(*_checkpoints_shape(u, A, train))
    call = _inputs(described)
    call.out, call.state_new = strided(out), last.data_ptr()
    if train:
        call.checkpoints = checkpoints.data_ptr()
    one = t == 1 and not train
    check_flags(_entries()["scan_step" if one else "scan"](ctypes.byref(call)))
    return out, last, checkpoints


def _checkpoints_shape(u: Tensor, A: Tensor, train: bool) -> tuple[int, ...]:
    b, c, t = u.shape
    return (b, (t + SEGMENT - 1) // SEGMENT, A.shape[1], c) if train else (0,)


def _backward(
    described: SelectiveScanCall, checkpoints: Tensor, grad_out: Tensor, grad_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of u, delta and z in their dtypes, of A, B, C, D, delta_bias and the state in float32."""
    u, delta, z = described.u, described.delta, described.z
    (b, c, t), (g, n) = u.shape, described.B.shape[1:3]
    call = _inputs(described)
    wanted = -(-2 * call.threads // max(1, b * g)) if call.threads > 1 else 1
    call.parts = min(wanted, MOST_PARTS, -(-(c // g) // 16))
    call.checkpoints, call.grad_out = checkpoints.data_ptr(), strided(grad_out)
    grad_state = _float32(grad_state)
    call.grad_state_new = address(grad_state)
    grad_u, grad_delta = empty_like(u), empty_like(delta)
    grad_z = u.new_empty(0) if z is None else empty_like(z)
    call.grad_u, call.grad_delta, call.grad_z = strided(grad_u), strided(grad_delta), strided(grad_z)
    new = output_pool.FLOATS.new_empty
    grad_A, grad_D, grad_bias, grad_h = new(b, c, n), new(b, c), new(b, c), new(b, c, n)
    grad_B, grad_C = new(call.parts, b, g, t, n), new(call.parts, b, g, t, n)
    call.grad_A, call.grad_D, call.grad_bias = grad_A.data_ptr(), grad_D.data_ptr(), grad_bias.data_ptr()
    call.grad_B, call.grad_C, call.grad_state = grad_B.data_ptr(), grad_C.data_ptr(), grad_h.data_ptr()
    check_flags(_entries()["scan_backward"](ctypes.byref(call)))
    mixing = [x.sum(0).mT for x in (grad_B, grad_C)]
    return grad_u, grad_delta, grad_A.sum(0), *mixing, grad_D.sum(0), grad_z, grad_bias.sum(0), grad_h


BACKWARD = "Tensor checkpoints, Tensor grad_out, Tensor? grad_state"
_scan = define_call("selective_scan", SelectiveScanCall, _forward, "bool train", 3)
_scan_backward = define_call("selective_scan_backward", SelectiveScanCall, _backward, BACKWARD, 9)


def _fake(*flat: Any) -> tuple[Tensor, ...]:
    (u, _delta, A, *_), train = flat, flat[-1]
    last = A.new_empty(*u.shape[:2], A.shape[1])
    return fake_like(u), last, A.new_empty(_checkpoints_shape(u, A, train))


def _fake_backward(*flat: Any) -> tuple[Tensor, ...]:
    u, delta, A, B, _C, _D, z, *_ = flat
    b, c, t = u.shape
    mixing = [A.new_empty(b, B.shape[1], t, B.shape[2]).mT for _ in range(2)]
    grad_z = u.new_empty(0) if z is None else fake_like(z)
    ends = A.new_empty(c), grad_z, A.new_empty(c), A.new_empty(b, *A.shape)
    return fake_like(u), fake_like(delta), A.new_empty(A.shape), *mixing, *ends


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, state, ctx.delta_softplus, _train = inputs
    ctx.has_state = state is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])


def _gradients(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, _checkpoints: Any) -> Any:
    *tensors, checkpoints = ctx.saved_tensors
    u, _delta, _A, B, C, D, z, delta_bias = tensors
    grad_out = torch.zeros_like(u) if grad_out is None else grad_out
    found = _scan_backward(*tensors, None, ctx.delta_softplus, checkpoints, grad_out, grad_state)
    grad_u, grad_delta, grad_A, grad_B, grad_C, grad_D, grad_z, grad_bias, grad_h = found
    return (
        *(grad_u, grad_delta, grad_A, grad_B.to(B.dtype), grad_C.to(C.dtype)),
        *(None if D is None else grad_D, None if z is None else grad_z, None if delta_bias is None else grad_bias),
        *(grad_h if ctx.has_state else None, None, None),
    )


_scan.register_fake(_fake)
_scan_backward.register_fake(_fake_backward)
_scan.register_autograd(_gradients, setup_context=_context)
_scan_backward.register_autograd(no_second_derivative)
