"""The portable engine: chunked matrix products in torch, on any device, with any kernel."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.base import compute_dtype, is_plain
from ..ops.linear_attention import chunk
from ..states.linear import LinearState, count_written
from . import checkpointing
from .call import Call

LONG_STREAM = 1024  # tokens from which on states are rounded with a dither
CHUNK = 64  # tokens of a causal chunk: wide enough for matrix products, narrow enough to waste little on its mask


def update_state(call: Call, key: Tensor, value: Tensor, state: LinearState) -> LinearState:
    """The state after adding keys (B, H, S, D) and values (B, H, S, M)."""
    keep = _keeps_scale(state, call.key_mask)

    def segment(k: Any, v: Any, mask: Any, decay: Any, gain: Any, sums: Tensor, log_scale: Tensor) -> Any:
        features, beta, values = _keys(call, k, v, mask, _gate(decay, gain), keep)
        return None, None, *_decayed(*chunk.update_state(features, beta, values, sums, log_scale), decay)

    pieces = (key, value, call.key_mask, call.log_decay, call.log_input)
    _, _, sums, log_scale = checkpointing.run(
        segment, call.kernel, pieces, _widened(_join(state)), state.log_scale, rows=None
    )
    return _split(state, sums, log_scale, count_written(key, call.key_mask))


def read_state(call: Call, query: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
    """What queries (B, Hq, L, D) get from a state: (B, Hq, L, M); the numerators alone without `normalize`."""
    B, heads = query.shape[:2]
    H = state.Z.shape[1]

    def segment(q: Tensor, sums: Tensor, log_scale: Tensor) -> Any:
        features, weight = call.kernel.scaled_query_features(q, scale=call.scale)
        G, T = heads // H, q.shape[-2]
        out = features.reshape(B, H, G * T, features.shape[-1]) @ sums
        shape = B, heads, T, sums.shape[-1] - 1
        if not call.normalize:
            weight = None if weight is None else weight.reshape(B, H, G * T)
            row_scale = log_scale.masked_fill(log_scale == -torch.inf, 0).unsqueeze(-1)
            return chunk.numerators(out, row_scale, weight).reshape(shape), None, sums, log_scale
        rows, small = chunk.divide(out)
        return rows.reshape(shape), small.sum(-1), sums, log_scale

    rows = (B, heads, query.shape[-2], state.value_dim)
    out, small, _, _ = checkpointing.run(segment, call.kernel, (query,), _join(state), state.log_scale, rows=rows)
    assert out is not None
    guarded = 0 if small is None else small * (state.tokens > 0)
    return out, replace(state, guarded=state.guarded + guarded)


def causal(call: Call, query: Tensor, key: Tensor, value: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
    """Queries (B, Hq, T, D) against the state and the keys up to their own; and the state after them."""
    B, heads, T = query.shape[:3]
    H = key.shape[1]
    keep = _keeps_scale(state, call.key_mask)

    def segment(q: Any, k: Any, v: Any, mask: Any, decay: Any, gain: Any, sums: Tensor, log_scale: Tensor) -> Any:
        features, beta, values = _keys(call, k, v, mask, _gate(decay, gain), keep)
        query_features, weight = call.kernel.scaled_query_features(q, scale=call.scale)
        G, T = heads // H, q.shape[-2]
        query_features = query_features.reshape(B, H, G, T, features.shape[-1])
        out, row, sums, log_scale = chunk.causal(query_features, features, beta, values, sums, log_scale, min(CHUNK, T))
        shape = B, heads, T, values.shape[-1] - 1
        if not call.normalize:
            total = None if decay is None else decay.cumsum(-1).unsqueeze(2)
            row, weight = None if row is None else row.unsqueeze(2), None if weight is None else weight.view(B, H, G, T)
            return chunk.numerators(out, row, total, weight).reshape(shape), None, *_decayed(sums, log_scale, decay)
        out, small = chunk.divide(out)
        return out.reshape(shape), small.sum((-2, -1)), *_decayed(sums, log_scale, decay)

    pieces = (query, key, value, call.key_mask, call.log_decay, call.log_input)
    rows = (B, heads, T, value.shape[-1])
    out, small, sums, log_scale = checkpointing.run(
        segment, call.kernel, pieces, _widened(_join(state)), state.log_scale, rows=rows, multiple=CHUNK
    )
    assert out is not None
    guarded = state.guarded if small is None else state.guarded + small
    if call.key_mask is not None and call.normalize:  # fully masked rows are legitimately 0: do not count them
        blind = (call.key_mask.cumsum(-1) == 0).sum(-1, keepdim=True) * (heads // H)
        # Keys that a closed gate kept out are not counted as tokens, but rows that see one of them are not guarded.
        guarded = torch.maximum(guarded - blind * (state.tokens == 0), state.guarded)
    new = _split(state, sums, log_scale, count_written(key, call.key_mask))
    return out, replace(new, guarded=guarded)


def _keeps_scale(state: LinearState, mask: Tensor | None) -> bool:
    """Whether keys without log-weights get them, because the sums come with a scale of their own.

    Multiplied with it, sums that decay has made small would vanish, though masks may leave rows that see nothing else.
    """
    if mask is None or state.untouched:
        return False
    scale = state.log_scale.detach()
    return not is_plain(scale) or bool(((scale != 0) & (scale != -torch.inf)).any())


def _keys(
    call: Call, key: Tensor, value: Tensor, mask: Tensor | None, gate: Tensor | None, weighted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Features, log-weights and values with a column of ones. A masked key counts nothing, even if it holds NaN.

    weighted: return log-weights even if all of them are 0.
    """
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    features, beta = call.kernel.scaled_key_features(key, scale=call.scale)
    if beta is None and weighted:
        beta = features.new_zeros(features.shape[:-1])
    if gate is not None:
        beta = gate if beta is None else beta.to(gate.dtype) + gate
    if mask is not None:
        if beta is None:
            features = features.masked_fill(~mask[:, None, :, None], 0)
        else:
            beta = beta.masked_fill(~mask[:, None, :], -torch.inf)
    value = value.to(compute_dtype(value.dtype))
    return features, beta, torch.cat([value, torch.ones_like(value[..., :1])], -1)


def _gate(log_decay: Tensor | None, log_input: Tensor | None) -> Tensor | None:
    """Decay as a log-weight of each key: dividing key j by all the decay up to j is the same as decaying it later on."""
    if log_decay is None:
        return None
    gate = -log_decay.cumsum(-1)
    return gate if log_input is None else gate + log_input


def _decayed(sums: Tensor, log_scale: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Applies a segment's decay to the sums after it: to the numbers in the scale, to the gradient in the sums."""
    if log_decay is None:
        return sums, log_scale
    total = log_decay.sum(-1)
    return sums * (total - total.detach()).exp().to(sums.dtype)[..., None, None], (log_scale + total.detach()).to(
        sums.dtype
    )


def _join(state: LinearState) -> Tensor:
    return torch.cat([state.S, state.Z.unsqueeze(-1)], -1)


def _widened(sums: Tensor) -> Tensor:
    """In float64, where the device has it: each segment adds a small part to large sums."""
    return sums if sums.device.type == "mps" else sums.to(torch.float64)


def _split(state: LinearState, sums: Tensor, log_scale: Tensor, tokens: Tensor | int) -> LinearState:
    sums = _rounded(sums, state)
    S, Z = sums[..., :-1].contiguous(), sums[..., -1].contiguous()
    log_scale = log_scale.to(state.log_scale.dtype).contiguous()
    return replace(state, S=S, Z=Z, log_scale=log_scale, tokens=state.tokens + tokens)


def _rounded(sums: Tensor, state: LinearState) -> Tensor:
    """LinearState (B, H, r, M + 1) in the dtype of the state they go into.

    A stream of many short calls rounds its state many times, and always the same way where tokens are alike. So a state of
    many tokens is rounded up or down by a dither that is spread evenly over the calls: what is below half a unit of a
    large sum is not lost. csrc/linear/linear_state.h does the same.
    """
    dtype = state.Z.dtype
    if sums.dtype == dtype or state.untouched:
        return sums.to(dtype)
    features = torch.arange(sums.shape[-2], dtype=sums.dtype, device=sums.device)
    places = state.tokens.unsqueeze(-1).to(sums.dtype) * 0.6180339887498949 + features * 0.7548776662466927
    dither = (places.frac() - 0.5).masked_fill((state.tokens < LONG_STREAM).unsqueeze(-1), 0)  # (B, H, r)
    near = sums.detach().to(dtype)
    size = near.abs()
    unit = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
    unit = unit.masked_fill(near == sums.detach(), 0)  # exact: below a power of two, half a unit is a number of its own
    return (sums + dither.unsqueeze(-1) * unit).to(dtype)
