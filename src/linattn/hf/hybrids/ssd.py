"""Mamba-2's chunk scan and its update by one token under the arguments of mamba_ssm's functions."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engines.native import decayed_sums as native
from ...engines.native import decayed_sums_bindings as bindings
from ...engines.native.plans import eligible
from ...engines.plan import rule_refusal
from ...functional import routing
from ...kernels.base import compute_dtype
from ...ops.decayed_sums import chunk
from ...ops.decayed_sums.call import DecayedSumsCall
from .packing import packed_bounds
from .state_checks import check_state


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """mamba_ssm's mamba_chunk_scan_combined.

    x: (batch, T, heads, head dim). dt: (batch, T, heads). A: (heads). B, C: (batch, T, groups, n). D: (heads). z: as x.
    initial_states: (batch, heads, head dim, n). Returns (batch, T, heads, head dim), with return_final_states also the states.
    """
    dtype = compute_dtype(x.dtype)
    packed = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
    bounds = packed_bounds(seq_idx, packed, x.shape[1])
    if bounds is not None and initial_states is not None:
        raise ValueError("packed sequences start from nothing: pass no cache with them.")
    if initial_states is not None:
        check_state(initial_states, x.shape[0], *x.shape[2:], B.shape[3])
    with torch.autocast(x.device.type, enabled=False):
        dt = _time_steps(dt.to(dtype), dt_bias, dt_softplus, dt_limit)
        query, key, value = (y.to(x.dtype).transpose(1, 2) for y in (C, B, x))
        log_decay = (dt * A.to(dtype)).transpose(1, 2)
        state = None if initial_states is None else initial_states.to(dtype).mT
        tokens = _Tokens(query, key, value, log_decay, dt.transpose(1, 2), None if D is None else D.to(dtype))
        out, final = _scan(tokens, bounds, state)
        out = out.transpose(1, 2).contiguous()
        out = out if z is None else out * F.silu(z.to(dtype))
    return (out, final.mT.contiguous()) if return_final_states else out


def _time_steps(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if softplus else dt
    least, most = limit
    return dt if softplus and least <= 0 and math.isinf(most) else dt.clamp(least, most)


class _Tokens(NamedTuple):
    """C, B and x as query, key and value (batch, heads or groups, T, dim), log_decay and dt (batch, heads, T), D (heads)."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    dt: Tensor
    skip: Tensor | None


def _scan(tokens: _Tokens, bounds: list[int] | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(batch, heads, T, head dim) and the last states (batch, heads, n, head dim)."""
    query, key, value, log_decay, dt, skip = tokens
    if (router := routing.current()) is not None:  # over shards: without a cache, see hf.sharding
        steps, more = (
            (value * dt.unsqueeze(-1)).to(value.dtype),
            {"scale": 1.0, "enable_gqa": True, "cu_seqlens": bounds},
        )
        out, final = router.function("decayed_sums")(query, key, steps, log_decay=log_decay, **more)
        return out if skip is None else out + value * skip[:, None, None], final.S
    served = rule_refusal(query, key, value) is None
    if served and eligible(*(y for y in (*tokens, state) if y is not None)):
        skip = None if skip is None else skip.contiguous()
        return bindings.forward(DecayedSumsCall(query, key, value, log_decay, None, bounds, state), False, dt, skip)[:2]
    rule = native.decayed_sums if served else chunk.decayed_sums
    steps = (value * dt.unsqueeze(-1)).to(value.dtype)
    out, final = rule(DecayedSumsCall(query, key, steps, log_decay, None, bounds, state))
    return out if skip is None else out + value * skip[:, None, None], final
