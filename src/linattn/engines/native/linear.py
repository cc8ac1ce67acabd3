"""update_state, read_state and causal on the native code: the same three functions as the torch engine's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...states import finite
from ...states.linear import LinearState
from ..call import Call
from . import autograd, bindings, unfused
from .feature_maps import NativeMap
from .plans import native_map


def update_state(call: Call, key: Tensor, value: Tensor, state: LinearState) -> LinearState:
    """The state after adding keys (B, H, S, D) and values (B, H, S, M)."""
    if call.log_decay is not None:
        return _update_decayed(call, key, value, state)
    fmap = native_map(call.kernel, call.scale, key.shape[-1])
    if not fmap.fused:
        return unfused.update_state(apply, fmap, call, key, value, state)
    key, weight = _keys(fmap, call, key)
    *sums, guarded = _before(state, key, value, weight)
    tensors = key, value.to(key.dtype), *sums, call.key_mask, weight
    S, Z, log_scale, tokens = apply("update_state", fmap, tensors, weighted=weight is not None)
    return LinearState(state.kernel, S, Z, log_scale, tokens, torch.zeros_like(tokens) if guarded is None else guarded)


def _update_decayed(call: Call, key: Tensor, value: Tensor, state: LinearState) -> LinearState:
    """Each key is decayed by what comes after it, the sums by everything.

    Weights go in relative to the largest visible one: a float32 scale has no digits left for what many hidden tokens
    at the end have decayed.
    """
    log_decay, key_mask = call.log_decay, call.key_mask
    assert log_decay is not None
    total = log_decay.sum(-1)
    weight = total.unsqueeze(-1) - log_decay.cumsum(-1)
    if call.log_input is not None:
        weight = weight + call.log_input
    visible = weight.detach() if key_mask is None else weight.detach().masked_fill(~key_mask.unsqueeze(1), -torch.inf)
    top = visible.amax(-1)
    top = top.masked_fill(top == -torch.inf, 0)
    S, Z, log_scale = state.S, state.Z, state.log_scale
    change = (total - total.detach()).exp().to(S.dtype)
    log_scale = (log_scale + (total.detach() - top)).to(log_scale.dtype)
    state = replace(state, S=S * change[..., None, None], Z=Z * change[..., None], log_scale=log_scale)
    undecayed = replace(call, log_decay=None, log_input=weight - top.unsqueeze(-1))
    new = update_state(undecayed, key, value, state)
    return replace(new, log_scale=(new.log_scale + top).to(log_scale.dtype))


def read_state(call: Call, query: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
    """What queries (B, Hq, L, D) get from a state: (B, Hq, L, M)."""
    fmap = native_map(call.kernel, call.scale, query.shape[-1])
    if not fmap.fused:
        return unfused.read_state(apply, fmap, call, query, state)
    query = _queries(fmap, call, query)
    out, guarded = apply("read_state", fmap, (query, state.S, state.Z, state.log_scale, state.tokens, state.guarded))
    return out, replace(state, guarded=guarded)


def causal(call: Call, query: Tensor, key: Tensor, value: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
    """Queries (B, Hq, T, D) against the state and the keys up to their own; and the state after them."""
    fmap = native_map(call.kernel, call.scale, key.shape[-1])
    if not fmap.fused:
        return unfused.causal(apply, fmap, call, query, key, value, state)
    query = _queries(fmap, call, query)
    key, weight = _keys(fmap, call, key)
    sums = _before(state, query, key, value, call.log_decay, weight)
    tensors = query, key, value.to(key.dtype), *sums, call.key_mask, call.log_decay, weight
    weighted = weight is not None or call.log_decay is not None
    out, S, Z, log_scale, tokens, guarded, _ = apply("causal", fmap, tensors, weighted=weighted)
    return out, LinearState(state.kernel, S, Z, log_scale, tokens, guarded)


def _queries(fmap: NativeMap, call: Call, query: Tensor) -> Tensor:
    return call.kernel.native_inputs(query, call.scale, is_key=False)[0] if fmap.form.prepared else query


def _keys(fmap: NativeMap, call: Call, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """The keys as the map takes them, and the logarithm of what else multiplies each key."""
    weight = call.log_input
    if not fmap.form.prepared:
        return key, weight
    if call.key_mask is not None:
        key = key.masked_fill(~call.key_mask[:, None, :, None], 0)
    key, log_weight = call.kernel.native_inputs(key, call.scale, is_key=True)
    if log_weight is not None:
        weight = log_weight.double() if weight is None else weight + log_weight
    return key, weight


def _before(state: LinearState, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The sums to go on from; None for each where no token was seen and no gradient is wanted."""
    if state.untouched and not _trained(*tensors):
        return (None,) * 5
    return state.S, state.Z, state.log_scale, state.tokens, state.guarded


def _trained(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def apply(name: str, fmap: NativeMap, tensors: Sequence[Tensor | None], *, weighted: bool = False) -> Any:
    """Through torch's dispatcher where a graph or a gradient is wanted, else straight to the library.

    weighted: keys carry log-weights, beside those of the map.
    """
    ints, floats = fmap.numbers(True if weighted else None)
    arguments: list[Any] = [*tensors, list(fmap.weights), ints, floats]
    train = _trained(*tensors)
    if name == "causal":
        arguments.append(train)
    if torch.compiler.is_compiling():
        return getattr(autograd, name)(*arguments)
    try:
        return getattr(autograd if train else bindings, name)(*arguments)
    except bindings.NotFiniteError:
        tokens = {"update_state": ("key", "value"), "read_state": ("query",), "causal": ("query", "key", "value")}[name]
        names = *tokens, "the state's S", "the state's Z"
        finite.refuse(torch.float32, **{n: x for n, x in zip(names, tensors, strict=False) if x is not None})
