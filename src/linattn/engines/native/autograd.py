"""The calls as operators of torch: known to torch.compile by their shapes, to autograd by their backward operators."""

from typing import Any

import torch
from torch import Tensor

from . import bindings as calls
from .operators import define, empty_floats

_SUMS = "Tensor S, Tensor Z, Tensor scale, Tensor tokens"
_KEYS = "Tensor key, Tensor value"
_MAP = "Tensor[] weights, int[] ints, float[] floats"


def _define(name: str, arguments: str, results: str) -> Any:
    function = getattr(calls, name)
    schema = f"({arguments}, {_MAP}{', bool train' if name == 'causal' else ''}) -> ({results})"
    return define(name, function, schema)


update_state = _define(
    "update_state", f"{_KEYS}, {_SUMS}, Tensor? mask, Tensor? log_weight", "Tensor, Tensor, Tensor, Tensor"
)
read_state = _define("read_state", f"Tensor query, {_SUMS}, Tensor guarded", "Tensor, Tensor")
causal = _define(
    "causal",
    f"Tensor query, {_KEYS}, {_SUMS}, Tensor guarded, Tensor? mask, Tensor? log_decay, Tensor? log_weight",
    ", ".join(["Tensor"] * 7),
)
update_state_backward = _define(
    "update_state_backward",
    f"{_KEYS}, Tensor? mask, Tensor? log_weight, Tensor scale_new, Tensor grad_S, Tensor grad_Z",
    "Tensor, Tensor, Tensor",
)
read_state_backward = _define(
    "read_state_backward", "Tensor query, Tensor S, Tensor Z, Tensor out, Tensor grad_out", "Tensor, Tensor, Tensor"
)
causal_backward = _define(
    "causal_backward",
    f"Tensor query, {_KEYS}, Tensor? mask, Tensor? log_decay, Tensor? log_weight, Tensor out, Tensor checkpoints, "
    "Tensor grad_out, Tensor? grad_S, Tensor? grad_Z",
    ", ".join(["Tensor"] * 6),
)


@update_state.register_fake
def _(
    key: Any,
    value: Any,
    S: Any,
    Z: Any,
    scale: Any,
    tokens: Any,
    mask: Any,
    log_weight: Any,
    weights: Any,
    ints: Any,
    floats: Any,
) -> Any:
    return tuple(x.new_empty(x.shape) for x in (S, Z, scale, tokens))


@read_state.register_fake
def _(query: Any, S: Any, Z: Any, scale: Any, tokens: Any, guarded: Any, weights: Any, ints: Any, floats: Any) -> Any:
    return empty_floats(query, *query.shape[:3], S.shape[3]), tokens.new_empty(tokens.shape)


@causal.register_fake
def _(
    query: Any,
    key: Any,
    value: Any,
    S: Any,
    Z: Any,
    scale: Any,
    tokens: Any,
    guarded: Any,
    mask: Any,
    decay: Any,
    log_weight: Any,
    weights: Any,
    ints: Any,
    floats: Any,
    train: Any,
) -> Any:
    sums = tuple(x.new_empty(x.shape) for x in (S, Z, scale, tokens, guarded))
    checkpoints = calls.checkpoints_shape(key, S.shape[2], S.shape[3], train)
    return (empty_floats(query, *query.shape[:3], value.shape[3]), *sums, empty_floats(query, *checkpoints))


@update_state_backward.register_fake
def _(
    key: Any,
    value: Any,
    mask: Any,
    log_weight: Any,
    scale_new: Any,
    grad_S: Any,
    grad_Z: Any,
    weights: Any,
    ints: Any,
    floats: Any,
) -> Any:
    return empty_floats(key, *key.shape), empty_floats(value, *value.shape), empty_floats(key, *key.shape[:3])


@read_state_backward.register_fake
def _(query: Any, S: Any, Z: Any, out: Any, grad_out: Any, weights: Any, ints: Any, floats: Any) -> Any:
    return empty_floats(query, *query.shape), empty_floats(S, *S.shape), empty_floats(Z, *Z.shape)


@causal_backward.register_fake
def _(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    decay: Any,
    log_weight: Any,
    out: Any,
    checkpoints: Any,
    grad_out: Any,
    grad_S: Any,
    grad_Z: Any,
    weights: Any,
    ints: Any,
    floats: Any,
) -> Any:
    sums = *key.shape[:2], ints[1]
    keys = empty_floats(key, *key.shape), empty_floats(value, *value.shape), empty_floats(key, *key.shape[:3])
    return (
        empty_floats(query, *query.shape),
        *keys,
        empty_floats(key, *sums, value.shape[3]),
        empty_floats(key, *sums),
    )


def _update_state_context(ctx: Any, inputs: Any, output: Any) -> None:
    key, value, _S, _Z, scale, _tokens, mask, log_weight, weights, ctx.ints, ctx.floats = inputs
    ctx.mark_non_differentiable(output[2], output[3])
    ctx.save_for_backward(key, value, mask, log_weight, scale, output[2], *weights)


def _update_state_grads(ctx: Any, grad_S: Tensor, grad_Z: Tensor, _scale: Any, _tokens: Any) -> Any:
    key, value, mask, log_weight, scale, scale_new, *weights = ctx.saved_tensors
    arguments = key, value, mask, log_weight, scale_new, grad_S, grad_Z, weights, ctx.ints, ctx.floats
    grad_key, grad_value, grad_log = update_state_backward(*arguments)
    factor = _incoming_factor(scale, ctx.ints[2], scale_new)
    grad_log = None if log_weight is None else grad_log.to(log_weight.dtype)
    grad_sums = grad_S * factor[..., None, None], grad_Z * factor[..., None]
    return (
        grad_key.to(key.dtype),
        grad_value.to(value.dtype),
        *grad_sums,
        None,
        None,
        None,
        grad_log,
        *_no_grads(weights),
    )


def _no_grads(weights: list[Tensor]) -> tuple[list[None], None, None]:
    return [None] * len(weights), None, None


def _incoming_factor(scale: Tensor, scaled: int, scale_new: Tensor | None = None) -> Tensor:
    """What the incoming sums were multiplied with to be added to; nothing was there where their scale is -inf."""
    shift = scale if scale_new is None else scale - scale_new
    if scaled and scale_new is None:
        shift = torch.zeros_like(scale)
    return torch.where(scale == -torch.inf, 0.0 if scaled else 1.0, shift.exp())


def _read_state_context(ctx: Any, inputs: Any, output: Any) -> None:
    query, S, Z, _scale, _tokens, _guarded, weights, ctx.ints, ctx.floats = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, S, Z, output[0], *weights)


def _read_state_grads(ctx: Any, grad_out: Tensor, _guarded: Any) -> Any:
    query, S, Z, out, *weights = ctx.saved_tensors
    grad_query, grad_S, grad_Z = read_state_backward(query, S, Z, out, grad_out, weights, ctx.ints, ctx.floats)
    return grad_query.to(query.dtype), grad_S, grad_Z, None, None, None, *_no_grads(weights)


def _causal_context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, _S, _Z, scale, _tokens, _guarded, mask, decay, log_weight, weights, ints, floats, _train = inputs
    out, S_new, Z_new, scale_new, tokens, guarded, checkpoints = output
    ctx.ints, ctx.floats = ints, floats
    ctx.set_materialize_grads(False)  # of `checkpoints` too they would be made, which is large
    ctx.mark_non_differentiable(scale_new, tokens, guarded, checkpoints)
    sums = (None, None) if decay is None else (S_new, Z_new)
    ctx.save_for_backward(query, key, value, scale, mask, decay, log_weight, out, checkpoints, *sums, *weights)


def _causal_grads(ctx: Any, grad_out: Tensor | None, grad_S: Tensor | None, grad_Z: Tensor | None, *_: Any) -> Any:
    query, key, value, scale, mask, decay, log_weight, out, checkpoints, S_new, Z_new, *weights = ctx.saved_tensors
    sums = *key.shape[:2], ctx.ints[1]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if decay is not None or grad_S is not None or grad_Z is not None:
        grad_S = empty_floats(out, *sums, value.shape[3]).zero_() if grad_S is None else grad_S
        grad_Z = empty_floats(out, *sums).zero_() if grad_Z is None else grad_Z
    grads = causal_backward(
        query,
        key,
        value,
        mask,
        decay,
        log_weight,
        out,
        checkpoints,
        grad_out,
        grad_S,
        grad_Z,
        weights,
        ctx.ints,
        ctx.floats,
    )
    grad_query, grad_key, grad_value, grad_log, old_S, old_Z = grads
    # With a mask the sums keep their scale (csrc/linear/forward_calls.h: keeps_scale); without, it was applied to them.
    factor = _incoming_factor(scale, ctx.ints[2], scale if mask is not None else None)
    grad_decay = None
    if decay is not None and grad_S is not None and grad_Z is not None:
        # Decay at t divides the weights of keys from t on, and multiplies the sums at the end.
        at_end = (grad_S * S_new).sum((-2, -1)) + (grad_Z * Z_new).sum(-1)
        grad_decay = at_end.double().unsqueeze(-1) - grad_log.double().flip(-1).cumsum(-1).flip(-1)
    return (
        *(g.to(x.dtype) for g, x in ((grad_query, query), (grad_key, key), (grad_value, value))),
        old_S * factor[..., None, None],
        old_Z * factor[..., None],
        *(None, None, None, None),
        None if decay is None or grad_decay is None else grad_decay.to(decay.dtype),
        None if log_weight is None else grad_log.to(log_weight.dtype),
        *_no_grads(weights),
        None,
    )


update_state.register_autograd(_update_state_grads, setup_context=_update_state_context)
read_state.register_autograd(_read_state_grads, setup_context=_read_state_context)
causal.register_autograd(_causal_grads, setup_context=_causal_context)


def _refuse_second_derivative(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        'the native engine has no second derivatives: call linattn.attention(..., engine="torch") to differentiate twice.'
    )


for _operator in (update_state_backward, read_state_backward, causal_backward):
    _operator.register_autograd(_refuse_second_derivative)
