"""The native delta rule as operators of torch: known to torch.compile by their shapes, to autograd by a backward operator."""

from typing import Any

import torch
from torch import Tensor

from . import delta_rule, output_pool
from .operators import define, empty_floats

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor? log_decay, Tensor? mask, int[]? cu_seqlens,"
    " Tensor? state"
)
_OPTIONS = "float scale, bool normalize_qk"


forward = define("delta_rule", delta_rule.forward, f"({_INPUTS}, {_OPTIONS}, bool train) -> (Tensor, Tensor, Tensor)")
backward = define(
    "delta_rule_backward",
    delta_rule.backward,
    f"({_INPUTS}, Tensor checkpoints, Tensor grad_out, Tensor? grad_final, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _state_shape(key: Tensor, value: Tensor, cu_seqlens: list[int] | None) -> tuple[int, ...]:
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    return value.shape[0] * sequences, value.shape[1], key.shape[3], value.shape[3]


def _forward_shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, _beta, _log_decay, _mask, cu_seqlens, _state, _scale, _normalize_qk, train = inputs
    shape = query.shape[0], max(query.shape[1], value.shape[1]), query.shape[2], value.shape[3]
    out = output_pool.empty_rows(shape, value)
    saved = delta_rule.checkpoint_shape(query, value, cu_seqlens, train)
    return out, empty_floats(query, *_state_shape(key, value, cu_seqlens)), empty_floats(query, *saved)


def _backward_shapes(*inputs: Any) -> tuple[Tensor, ...]:
    query, key, value, beta, log_decay, _mask, cu_seqlens, *_ = inputs
    decay = (0,) if log_decay is None else log_decay.shape
    shapes = query.shape, key.shape, value.shape, beta.shape, decay, _state_shape(key, value, cu_seqlens)
    return tuple(empty_floats(query, *shape) for shape in shapes)


forward.register_fake(_forward_shapes)
backward.register_fake(_backward_shapes)


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, cu_seqlens, state, scale, normalize_qk, _train = inputs
    ctx.numbers = cu_seqlens, scale, normalize_qk
    ctx.set_materialize_grads(False)  # of the checkpoints too they would be made, which are large
    ctx.mark_non_differentiable(output[2])
    ctx.out_shape = output[0].shape
    ctx.save_for_backward(*tensors, state, output[2])


def _grads(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None, _saved: Any) -> Any:
    *inputs, state, saved = ctx.saved_tensors
    cu_seqlens, scale, normalize_qk = ctx.numbers
    query, key, value, _beta, log_decay, _mask = inputs
    if grad_out is None:
        grad_out = query.new_zeros(ctx.out_shape)
    grads = backward(*inputs, cu_seqlens, state, saved, grad_out, grad_final, scale, normalize_qk)
    tokens = [grad.to(x.dtype) for grad, x in zip(grads[:3], (query, key, value), strict=True)]
    grad_decay = None if log_decay is None else grads[4]
    return (*tokens, grads[3], grad_decay, None, None, None if state is None else grads[5], None, None, None)


forward.register_autograd(_grads, setup_context=_context)


def _refuse_second_derivative(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        'the native engine has no second derivatives: call linattn.delta_rule(..., engine="torch") to differentiate twice.'
    )


backward.register_autograd(_refuse_second_derivative)


def differentiable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: list[int] | None,
    state: Tensor | None,
    scale: float,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    """linattn.engines.native.delta_rule.delta_rule through the operators."""
    given = query, key, value, beta, log_decay, state
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    out, final, _ = forward(query, key, value, beta, log_decay, mask, cu_seqlens, state, scale, normalize_qk, train)
    return out, final
