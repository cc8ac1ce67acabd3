"""Linear attention on either engine: which sums are formed, in which order.

An engine has three functions, on tensors with one batch dimension:
    update_state(call, key, value, state) -> state
    read_state(call, query, state) -> (rows, state)
    causal(call, query, key, value, state) -> (rows, state)
"""

import dataclasses
from types import ModuleType

import torch
from torch import Tensor

from ..kernels.base import compute_dtype
from ..states.linear import LinearState, count_written
from .call import Call


def attend(
    engine: ModuleType, call: Call, query: Tensor, key: Tensor, value: Tensor, state: LinearState | None
) -> tuple[Tensor, LinearState]:
    """(B, heads, L, D), (B, kv heads, S, D), (B, kv heads, S, M) -> (B, heads, L, M), and the state after the keys."""
    before = empty_state(call, query, key, value) if state is None else state
    L, S = query.shape[-2], key.shape[-2]
    rows: tuple[Tensor, LinearState]
    if not call.is_causal:
        rows = engine.read_state(call, query, _update(engine, call, key, value, before, S))
        return rows
    # Bottom-right: the last query is aligned with the last key.
    both = min(L, S)
    state = _update(engine, call, key, value, before, S - both)
    early = []
    if both < L:
        first, query = query.split([L - both, both], -2)
        out, state = engine.read_state(call, first, state)
        early = [out]
    first_key = S - both
    late = call if first_key == 0 else call.keys(first_key, S)
    out, state = engine.causal(late, query, key[..., first_key:, :], value[..., first_key:, :], state)
    out = torch.cat([*early, out], -2) if early else out
    return (out, state) if call.writes is None else _without_closed_gates(call, out, state, before, key)


def empty_state(call: Call, query: Tensor, key: Tensor, value: Tensor) -> LinearState:
    features, dtype = call.kernel.features_of(query), compute_dtype(query.dtype)
    shape = (key.shape[0],), key.shape[1], features, value.shape[-1]
    return LinearState.empty(call.signature, *shape, dtype=dtype, device=query.device)


def _update(engine: ModuleType, call: Call, key: Tensor, value: Tensor, state: LinearState, count: int) -> LinearState:
    """Adds the first `count` keys."""
    if count <= 0:
        return state
    part = call if count == key.shape[-2] else call.keys(0, count)
    new: LinearState = engine.update_state(part, key[..., :count, :], value[..., :count, :], state)
    return new


def _without_closed_gates(
    call: Call, out: Tensor, state: LinearState, before: LinearState, key: Tensor
) -> tuple[Tensor, LinearState]:
    """Gates of exactly 1 let no token in: they are not counted, and rows that saw no other are 0.

    To the sums such a token has a weight of 2^-60, which no other key ever notices (ops/linear_attention/decay.py).
    """
    writes = call.writes
    assert writes is not None
    state = _without_residue(state, before.tokens + count_written(key, call.key_mask, writes))
    if call.key_mask is not None:
        writes = writes & call.key_mask.unsqueeze(1)
    L, S, H = out.shape[2], key.shape[2], key.shape[1]
    seen = (writes.cumsum(-1) > 0) | (before.tokens > 0).unsqueeze(-1)  # (B, H, S)
    first = (before.tokens > 0).unsqueeze(-1).expand(-1, -1, max(0, L - S))
    seen = torch.cat([first, seen[..., max(0, S - L) :]], -1).repeat_interleave(out.shape[1] // H, 1)
    shown = out.masked_fill(~seen.unsqueeze(-1), 0)
    if not call.normalize:  # such a row is 0, but it grows as soon as the gate opens: its gradient stays
        shown = out + (shown - out).detach()
    return shown, state


def _without_residue(state: LinearState, tokens: Tensor) -> LinearState:
    """The state with these counts. Sums without a token are 0: a later row that sees nothing else must not read them.

    Their gradients stay.
    """
    nothing = tokens == 0
    S = torch.where(nothing[..., None, None], state.S - state.S.detach(), state.S)
    Z = torch.where(nothing[..., None], state.Z - state.Z.detach(), state.Z)
    return dataclasses.replace(state, S=S, Z=Z, tokens=tokens)
