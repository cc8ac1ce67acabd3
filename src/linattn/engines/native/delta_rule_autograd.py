"""The native delta rule as operators of torch: known to torch.compile by their shapes, to autograd by a backward operator."""

from typing import Any

import torch
from torch import Tensor

from ...ops.delta_rule.call import DeltaRuleCall
from . import delta_rule, output_pool
from .operators import define_call, empty_floats

BACKWARD = "Tensor checkpoints, Tensor grad_out, Tensor? grad_final"
forward = define_call("delta_rule", DeltaRuleCall, delta_rule.forward, "bool train", 3)
backward = define_call("delta_rule_backward", DeltaRuleCall, delta_rule.backward, BACKWARD, 6)


def _state_shape(key: Tensor, value: Tensor, cu_seqlens: list[int] | None) -> tuple[int, ...]:
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    return value.shape[0] * sequences, value.shape[1], key.shape[3], value.shape[3]


def _forward_shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, train = DeltaRuleCall(*inputs[:-1]), inputs[-1]
    query, key, value, cu_seqlens = call.query, call.key, call.value, call.cu_seqlens
    shape = query.shape[0], max(query.shape[1], value.shape[1]), query.shape[2], value.shape[3]
    out = output_pool.empty_rows(shape, value)
    saved = delta_rule.checkpoint_shape(query, value, cu_seqlens, train)
    return out, empty_floats(query, *_state_shape(key, value, cu_seqlens)), empty_floats(query, *saved)


def _backward_shapes(*inputs: Any) -> tuple[Tensor, ...]:
    call = DeltaRuleCall(*inputs[:-3])
    decay = (0,) if call.log_decay is None else call.log_decay.shape
    state = _state_shape(call.key, call.value, call.cu_seqlens)
    shapes = call.query.shape, call.key.shape, call.value.shape, call.beta.shape, decay, state
    return tuple(empty_floats(call.query, *shape) for shape in shapes)


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
    grads = backward(*inputs, cu_seqlens, state, scale, normalize_qk, saved, grad_out, grad_final)
    tokens = [grad.to(x.dtype) for grad, x in zip(grads[:3], (query, key, value), strict=True)]
    grad_decay = None if log_decay is None else grads[4]
    return (*tokens, grads[3], grad_decay, None, None, None if state is None else grads[5], None, None, None)


forward.register_autograd(_grads, setup_context=_context)


def _refuse_second_derivative(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        'the native engine has no second derivatives: call linattn.delta_rule(..., engine="torch") to differentiate twice.'
    )


backward.register_autograd(_refuse_second_derivative)


def differentiable(call: DeltaRuleCall) -> tuple[Tensor, Tensor]:
    """linattn.engines.native.delta_rule.delta_rule through the operators."""
    given = *call[:5], call.state
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    out, final, _ = forward(*call, train)
    return out, final
