"""Fast paths of the update rules: calls without masks or gradients, with little Python around the native code.

What calls of one shape have in common is worked out once and kept as a plan. The library itself checks the numbers. Guards tell
that a call is like an earlier one.
"""

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, get_num_threads
from torch.compiler import is_compiling

from ..engines.native import decayed_sums_bindings, delta_rule
from ..engines.native.ffi import OVERFLOWED, library
from ..engines.native.guards import guards_of, unwatched
from ..engines.native.output_pool import empty as pooled_empty
from ..engines.native.plans import eligible
from ..engines.native.step_plan import StepPlan
from ..ops.decayed_sums.call import DecayedSumsCall
from ..ops.delta_rule.call import DeltaRuleCall
from ..states.recurrent import RecurrentState
from .recurrent_checks import LOWEST

Tokens = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # query, key, value, beta (not of sums), log_decay
Options = tuple[float | None, bool, bool]  # scale, normalize_qk, enable_gqa

MOST_PLANS = 512
MOST_GUARDS = 4

_plans: dict[Hashable, StepPlan | None] = {}
_fitting: dict[Hashable, bool] = {}  # shapes and dtypes of `prefill` -> whether it serves them


class _Guarded(NamedTuple):
    """A plan, and what a call must be like to have it. counts: the library may count the token in a donated state."""

    setting: Hashable
    guards: Any
    plan: StepPlan
    counts: bool


_guarded: tuple[_Guarded, ...] = ()  # the newest first


def decode(
    rule: str, tokens: Tokens, options: Options, state: object, donate: bool = False
) -> tuple[Tensor, RecurrentState] | None:
    """rows and the new state, or None: then the call is not eligible, and the general path serves it or says what is wrong.

    rule: the state's `kernel`. donate: the new state takes the place of the old one in memory, and is the same object.
    """
    if type(state) is not RecurrentState or state.kernel != rule or is_compiling() or library.why_not is not None:
        return None
    (query, key, value, beta, log_decay), S, count = tokens, state.S, state.tokens
    given: tuple[Tensor, ...]
    if beta is None:
        given = (query, key, value, S, count) if log_decay is None else (query, key, value, S, count, log_decay)
    elif log_decay is None:
        given = query, key, value, S, count, beta
    else:
        given = query, key, value, S, count, beta, log_decay
    setting = rule, beta is None, log_decay is None, options
    for entry in _guarded:
        if entry.setting == setting and unwatched() and entry.guards.check(*given):
            plan, counts = entry.plan, entry.counts
            break
    else:
        found = _find(tokens, options, S)
        if found is None:
            return None
        plan = found
        counts = count.is_contiguous() and count.dtype is torch.int64 and count.shape == S.shape[:2]
        _guard(setting, plan, counts, given)
    out = empty_like(plan.out_like)
    new = S if donate else pooled_empty(*plan.state_shape)
    counted = donate and counts
    flags = plan.entry(
        plan.fixed,
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        *(() if beta is None else (beta.data_ptr(),)),
        None if log_decay is None else log_decay.data_ptr(),
        None,
        S.data_ptr(),
        new.data_ptr(),
        out.data_ptr(),
        count.data_ptr() if counted else None,
        get_num_threads(),
    )
    if not flags:
        return out, state if counted else RecurrentState(rule, new, count + 1)
    if flags == OVERFLOWED and donate:
        raise ValueError(
            "the output of this token is beyond the range of its dtype, and so is the state that was donated."
        )
    return None


def _guard(setting: Hashable, plan: StepPlan, counts: bool, given: tuple[Tensor, ...]) -> None:
    """Lets the next calls like this one find their plan at once."""
    global _guarded
    guards = guards_of(given)
    if guards is not None:
        _guarded = (_Guarded(setting, guards, plan, counts), *_guarded[: MOST_GUARDS - 1])


def prefill(tokens: Tokens, options: Options, state: object) -> tuple[Tensor, RecurrentState] | None:
    """Many tokens of the delta rule: rows and the new state, or None where the general path must serve or refuse the call."""
    (query, key, value, beta, log_decay), (scale, normalize_qk, enable_gqa) = tokens, options
    S = None
    if state is not None:
        if not isinstance(state, RecurrentState) or state.kernel != "delta_rule":
            return None
        S = state.S
    given = [x for x in (*tokens, S) if x is not None]
    if any(not isinstance(x, Tensor) for x in given) or not eligible(*given) or library.why_not is not None:
        return None
    name = "prefill", enable_gqa, log_decay is None, S is None, *((x.shape, x.dtype) for x in given)
    if name not in _fitting:
        if len(_fitting) >= MOST_PLANS:
            _fitting.clear()
        _fitting[name] = query.dim() == 4 and query.shape[2] > 1 and _fits(tokens, enable_gqa, S)
    if not _fitting[name] or (state is not None and state.tokens.shape != value.shape[:2]):
        return None
    if log_decay is not None:
        if not bool((log_decay <= 0).all()):
            return None
        log_decay = log_decay.clamp(min=LOWEST)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    assert beta is not None
    call = DeltaRuleCall(query, key, value, beta, log_decay, None, None, S, scale, normalize_qk)
    out, final, _ = delta_rule.forward(call, False)
    if not (math.isfinite(out.sum()) or bool(torch.isfinite(out).all())):
        return None
    T = query.shape[2]
    count = torch.full(final.shape[:2], T, device=final.device) if state is None else state.tokens + T
    return out, RecurrentState("delta_rule", final, count)


def _find(tokens: Tokens, options: Options, S: Tensor) -> StepPlan | None:
    """The plan of a call from the state S, if it is eligible."""
    query, key, value, beta, log_decay = tokens
    try:
        name = (
            *(query.shape, query.stride(), query.dtype, key.shape, key.stride(), key.dtype),
            *(value.shape, value.stride(), value.dtype, S.shape, S.stride(), S.dtype),
            None if beta is None else (beta.shape, beta.stride(), beta.dtype),
            None if log_decay is None else (log_decay.shape, log_decay.stride(), log_decay.dtype),
            options,
        )
        plan = _plans.get(name)
        if plan is None:
            if name in _plans:
                return None
            plan = _remember(name, _plan(tokens, options, S))
    except (AttributeError, TypeError):  # something is not a tensor
        return None
    gates = [x for x in (beta, log_decay) if x is not None]
    return plan if plan is not None and eligible(query, key, value, S, *gates) else None


def _remember(name: Hashable, plan: StepPlan | None) -> StepPlan | None:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[name] = plan
    return plan


def _plan(tokens: Tokens, options: Options, S: Tensor) -> StepPlan | None:
    """The plan of calls of these shapes, strides and dtypes; None where the general path must serve them."""
    (query, key, value, beta, log_decay), (scale, normalize_qk, enable_gqa) = tokens, options
    if query.dim() < 3 or query.shape[2] != 1 or not _fits(tokens, enable_gqa, S):
        return None
    rows = [query, key, value, *(x for x in (log_decay,) if x is not None and x.dim() == 4)]
    if not S.is_contiguous() or any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in rows):
        return None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if beta is None:
        return decayed_sums_bindings.step_plan(DecayedSumsCall(query, key, value, log_decay, scale=scale))
    call = DeltaRuleCall(query, key, value, beta, log_decay, scale=scale, normalize_qk=normalize_qk)
    return delta_rule.step_plan(call)


def _fits(tokens: Tokens, enable_gqa: bool, S: Tensor | None) -> bool:
    """Shapes are canonical as they are, and dtypes what the native code takes."""
    query, key, value, beta, log_decay = tokens
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    B, Hq, T, D = query.shape
    H, M, Hk = value.shape[1], value.shape[3], key.shape[1]
    if key.shape != (B, Hk, T, D) or value.shape != (B, H, T, M) or not B * H * T * D * M:
        return False
    if S is not None and (S.shape != (B, H, D, M) or S.dtype != torch.float32):
        return False
    if not Hq == Hk == H and (not enable_gqa or not Hq * Hk or H % Hk or (H % Hq and Hq % H)):
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    shapes = (B, H, T), (B, H, T, D)
    fine = all(x is None or (x.dtype == torch.float32 and x.shape in shapes) for x in (beta, log_decay))
    return fine and (beta is None or beta.dim() == 3)
