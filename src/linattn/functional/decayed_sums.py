"""Decayed sums without a denominator: what linattn.attention computes with kernel="identity", normalize=False."""

from torch import Tensor

from ..engines.native import decayed_sums as native
from ..ops.decayed_sums import chunk
from ..ops.decayed_sums.call import DecayedSumsCall
from ..ops.decayed_sums.state import last_state
from ..ops.packing import CuSeqlens
from ..states.base import State
from ..states.recurrent import RecurrentState
from . import routing
from .checks import check_scale
from .recurrent import EngineName, RuleArguments, choose, read_call
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
    if scale is not None:
        check_scale(scale)
    router, tokens = routing.current(), (query, key, value, None, log_decay)
    if (
        state is not None
        and key_mask is None
        and cu_seqlens is None
        and engine in ("auto", "native")
        and router is None
    ):
        quick = decode("decayed_sums", tokens, (scale, False, enable_gqa), state)
        if quick is not None:
            return quick
    arguments = RuleArguments(*tokens, scale, False, key_mask, enable_gqa, cu_seqlens, state, return_state, engine)
    if router is not None:
        found: tuple[Tensor, RecurrentState] = router.function("decayed_sums")(**arguments.of_sums())
        return found
    call = read_call("decayed_sums", arguments)
    out, final = call.run(native.decayed_sums if choose(engine, call) else chunk.decayed_sums)
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
    arguments = RuleArguments(key, key, value, log_decay=log_decay, key_mask=key_mask, enable_gqa=True, state=state)
    call = read_call("decayed_sums", arguments)
    assert isinstance(call.inputs, DecayedSumsCall)
    return call.state_after(last_state(call.inputs))
