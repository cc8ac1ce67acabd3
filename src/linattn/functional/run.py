"""Runs one checked call: packing, the kind of attention, the engine."""

import dataclasses
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor

from .. import engines
from ..engines import Call, linear, softmax
from ..kernels import Softmax
from ..nearfar import NearFar, NearFarState
from ..nearfar import attention as nearfar
from ..nearfar import native as nearfar_native
from ..ops.packing import Packing
from ..states import KeyValueCache, LinearState, State
from .checks import check_finite


def run(call: Call, query: Tensor, key: Tensor, value: Tensor, state: State | None) -> tuple[Tensor, State | None]:
    """(B, heads, L, D), (B, kv heads, S, D), (B, kv heads, S, M) -> (B, heads, L, M), and the state after the keys.

    Autocast is disabled inside; the output has the dtype of the query.
    """
    if query.is_meta:
        return _shapes(call, query, key, value, state)
    device = query.device.type
    autocast = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        out, new_state = _run(call, query, key, value, state)
    return out.to(query.dtype), new_state


def _run(call: Call, query: Tensor, key: Tensor, value: Tensor, state: State | None) -> tuple[Tensor, State | None]:
    if call.packing is not None:
        return _packed(call, query, key, value, state)
    new_state: State | None
    if isinstance(call.kernel, Softmax):
        engines.serves_natively(call.engine, None)  # torch serves; an unknown engine is refused
        out, new_state = softmax.attend(call, query, key, value, cast(KeyValueCache | None, state))
    elif isinstance(call.kernel, NearFar):
        out, new_state = _nearfar(call, query, key, value, cast(NearFarState | None, state))
    else:
        engine = engines.choose(call, query, key, value)
        out, new_state = linear.attend(engine, call, query, key, value, cast(LinearState | None, state))
        if engine is engines.native:  # which checks for NaN and infinity itself
            return out, new_state
    check_finite(out, new_state, state, query, key, value)
    return out, new_state


def _nearfar(
    call: Call, query: Tensor, key: Tensor, value: Tensor, state: NearFarState | None
) -> tuple[Tensor, NearFarState | None]:
    refusal = nearfar_native.refusal(call, query, key, value, state)
    engine = engines.choose(call, query, key, value, refusal)
    attend = nearfar_native.attend if engine is engines.native else nearfar.attend
    return attend(call, query, key, value, state)


def _packed(call: Call, query: Tensor, key: Tensor, value: Tensor, state: State | None) -> tuple[Tensor, State | None]:
    """Sequences of a packed tensor as rows of a padded batch."""
    assert call.packing is not None
    queries, keys = call.packing
    if isinstance(call.kernel, NearFar) and queries.bounds != keys.bounds:
        return _one_by_one(call, query, key, value, state, queries, keys), None
    entries = query.shape[0]
    valid = keys.valid(entries, key.device)
    mask = valid if call.key_mask is None else keys.pad(call.key_mask, token_dim=1) & valid
    log_decay, log_input, writes = (
        None if x is None else keys.pad(x, token_dim=2) for x in (call.log_decay, call.log_input, call.writes)
    )
    hidden = ~valid.unsqueeze(1)
    if log_decay is not None:
        log_decay = log_decay.masked_fill(hidden, 0)
    if log_input is not None:
        log_input = log_input.masked_fill(hidden, 0)
    padded = dataclasses.replace(
        call, key_mask=mask, log_decay=log_decay, log_input=log_input, writes=writes, packing=None
    )
    q, k, v = (p.pad(x, token_dim=2) for p, x in ((queries, query), (keys, key), (keys, value)))
    out, new_state = _run(padded, q, k, v, state)
    return queries.unpad(out, entries, token_dim=2), new_state


def _one_by_one(
    call: Call, query: Tensor, key: Tensor, value: Tensor, state: State | None, queries: Packing, keys: Packing
) -> Tensor:
    """One call per sequence: near/far uses statistics of the queries, which padding would change."""
    if state is not None or call.return_state:
        raise ValueError(
            "near/far attention over packed sequences takes and returns a state only where queries and keys have the "
            "same cu_seqlens: call it once for each sequence instead."
        )
    rows = []
    for i in range(queries.count):
        q, k = slice(*queries.bounds[i : i + 2]), slice(*keys.bounds[i : i + 2])
        alone = dataclasses.replace(call.keys(*keys.bounds[i : i + 2]), packing=None)
        rows.append(_run(alone, query[:, :, q], key[:, :, k], value[:, :, k], None)[0])
    return torch.cat(rows, 2)


def _shapes(call: Call, query: Tensor, key: Tensor, value: Tensor, state: State | None) -> tuple[Tensor, State | None]:
    """For meta tensors: an empty output of the right shape, and the state where its shape is known."""
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    if not call.return_state:
        return out, None
    if isinstance(call.kernel, NearFar) or call.packing is not None:
        raise ValueError(
            "the shape of this state depends on numbers, which tensors on the meta device do not have: "
            "pass return_state=False there."
        )
    if isinstance(call.kernel, Softmax):
        return out, softmax.extend(call, key, value, cast(KeyValueCache | None, state))
    return out, linear.empty_state(call, query, key, value)
