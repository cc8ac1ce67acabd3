"""Decayed sums without a denominator: what linattn.attention computes with kernel="identity", normalize=False."""

import math

from torch import Tensor

from ..engines.native import decayed_sums as native
from ..ops.decayed_sums import chunk
from ..ops.packing import CuSeqlens
from ..states.base import State
from ..states.recurrent import RecurrentState
from .checks import check_scale
from .recurrent import EngineName, choose, read_call
from .recurrent_decode import decode


def decayed_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    state: State | None = None,
    engine: EngineName = "auto",
) -> tuple[Tensor, RecurrentState]:
    """S <- exp(log_decay_t) S;  S <- S + k_t v_t^T;  out_t = scale q_t^T S. Arguments as in linattn.delta_rule."""
    check_scale(scale)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if state is not None and key_mask is None and cu_seqlens is None and engine != "torch":
        quick = decode("decayed_sums", query, key, value, None, log_decay, state, enable_gqa=enable_gqa, scale=scale)
        if quick is not None:
            return quick
    call = read_call(
        "decayed_sums",
        query,
        key,
        value,
        log_decay=log_decay,
        key_mask=key_mask,
        enable_gqa=enable_gqa,
        cu_seqlens=cu_seqlens,
        state=state,
    )
    rule = native.decayed_sums if choose(engine, call) else chunk.decayed_sums
    out, final = call.run(rule, scale=scale)
    return call.rows(out), call.state_after(final)
