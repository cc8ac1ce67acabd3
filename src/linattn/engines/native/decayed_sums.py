"""The decayed sums as operators of torch: one node for torch.compile, with gradients for autograd."""

from typing import Any

import torch
from torch import Tensor

from ...ops.decayed_sums.call import DecayedSumsCall
from . import decayed_sums_bindings as bindings
from . import output_pool
from .decayed_sums_bindings import available, decode
from .operators import define_call, empty_floats
from .plans import eligible

__all__ = ["available", "decayed_sums", "decode"]

BACKWARD = "Tensor checkpoints, Tensor grad_out, Tensor? grad_final"
forward_op = define_call("decayed_sums", DecayedSumsCall, bindings.forward, "bool train", 3)
backward_op = define_call("decayed_sums_backward", DecayedSumsCall, bindings.backward, BACKWARD, 5)


@forward_op.register_fake
def _(*flat: Any) -> Any:
    query, key, value, _log_decay, _mask, cu_seqlens, _state, _scale, train = flat
    heads, dims = value.shape[1], (key.shape[3], value.shape[3])
    bounds = [0, key.shape[2]] if cu_seqlens is None else cu_seqlens
    rows = query.shape[0], max(query.shape[1], heads), query.shape[2], value.shape[3]
    out = output_pool.empty_rows(rows, value)
    final = empty_floats(query, key.shape[0] * (len(bounds) - 1), heads, *dims)
    shape = (key.shape[0], bindings.segment_count(bounds), heads, *dims) if train else (0,)
    return out, final, empty_floats(query, *shape)


@backward_op.register_fake
def _(*flat: Any) -> Any:
    query, key, value, log_decay, _mask, cu_seqlens, *_ = flat
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    state = empty_floats(query, key.shape[0] * sequences, value.shape[1], key.shape[3], value.shape[3])
    decay = empty_floats(query, 0) if log_decay is None else empty_floats(query, *log_decay.shape)
    return *(empty_floats(x, *x.shape) for x in (query, key, value)), decay, state


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, log_decay, mask, ctx.cu_seqlens, state, ctx.scale, _train = inputs
    ctx.has_state = state is not None
    ctx.set_materialize_grads(False)  # of the checkpoints too they would be made, which are large
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(query, key, value, log_decay, mask, output[2])


def _grads(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None, _checkpoints: Any) -> Any:
    query, key, value, log_decay, mask, checkpoints = ctx.saved_tensors
    if grad_out is None:
        shape = (query.shape[0], max(query.shape[1], value.shape[1]), query.shape[2], value.shape[3])
        grad_out = query.new_zeros(shape)
    call = DecayedSumsCall(query, key, value, log_decay, mask, ctx.cu_seqlens, None, ctx.scale)
    grads = backward_op(*call, checkpoints, grad_out, grad_final)
    return (
        *(grad.to(x.dtype) for grad, x in zip(grads[:3], (query, key, value), strict=True)),
        None if log_decay is None else grads[3],
        None,
        None,
        grads[4] if ctx.has_state else None,
        None,
        None,
    )


def _refuse_second_derivative(ctx: Any, *_: Any) -> Any:
    raise RuntimeError('the native engine has no second derivatives: use engine="torch" to differentiate twice')


forward_op.register_autograd(_grads, setup_context=_context)
backward_op.register_autograd(_refuse_second_derivative)


def decayed_sums(call: DecayedSumsCall) -> tuple[Tensor, Tensor]:
    """Output (B, Ho, T, M) in the query's dtype and final state (B n, H, D, M); differentiable."""
    tensors = [x for x in (*call[:5], call.state) if x is not None]
    if eligible(*tensors):
        return bindings.forward(call, False)[:2]
    train = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out, final, _ = forward_op(*call, train)
    return out, final
