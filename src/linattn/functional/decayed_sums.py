"""Decayed sums without a denominator: what linattn.attention computes with kernel="identity", normalize=False."""

import math

from torch import Tensor

from ..engines.native import decayed_sums as native
from ..ops.decayed_sums import chunk
from ..ops.decayed_sums.state import last_state
from ..ops.packing import CuSeqlens
from ..ops.run import initial_state
from ..states.base import State
from ..states.recurrent import RecurrentState
from . import routing
from .checks import check_scale
from .recurrent import EngineName, choose, read_call
from .recurrent_fast_path import decode


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
    return_state: bool = True,
    engine: EngineName = "auto",
) -> tuple[Tensor, RecurrentState]:
    """S <- exp(log_decay_t) S;  S <- S + k_t v_t^T;  out_t = scale q_t^T S. Arguments as in linattn.delta_rule.

    return_state: False if the state is not used; over several processes the one returned is then that of this process.
    """
    if (router := routing.current()) is not None:
        found: tuple[Tensor, RecurrentState] = router.function("decayed_sums")(
            query,
            key,
            value,
            log_decay=log_decay,
            scale=scale,
            key_mask=key_mask,
            enable_gqa=enable_gqa,
            cu_seqlens=cu_seqlens,
            state=state,
            return_state=return_state,
            engine=engine,
        )
        return found
    if scale is not None:
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


def decayed_state(
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    key_mask: Tensor | None = None,
    state: State | None = None,
) -> RecurrentState:
    """The state that `decayed_sums` would return, without computing any row."""
    call = read_call(
        "decayed_sums",
        key,
        key,
        value,
        log_decay=log_decay,
        key_mask=key_mask,
        enable_gqa=True,
        cu_seqlens=None,
        state=state,
    )
    before = initial_state(call.query, call.key, call.value, 1) if call.state is None else call.state
    return call.state_after(last_state(call.key, call.value, call.log_decay, call.mask, before))
