"""The gated delta rule and Kimi delta attention under the arguments of fla's functions, as transformers' models call them."""

import math
from typing import Any

import torch
from torch import Tensor

from ...engines.native import delta_rule as native
from ...engines.native.plans import eligible
from ...engines.plan import rule_refusal
from ...functional import routing
from ...kernels.base import compute_dtype
from ...ops.delta_rule import chunk
from ...ops.delta_rule.call import DeltaRuleCall
from .packing import packed_bounds
from .state_checks import check_state


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Takes the place of fla's chunk and recurrent functions of both rules.

    query, key: (B, T, key heads, D). value: (B, T, H, M), H a multiple of the key heads. beta: (B, T, H). g: the log of the
    decay, (B, T, H), or (B, T, H, D) for KDA. initial_state: (B, H, D, M); one token without gradients is written into it.
    Returns (B, T, H, M), and the state or None.
    """
    dtype = compute_dtype(query.dtype)
    tokens = _heads_first(query.dtype, query, key, value)
    gates = _heads_first(dtype, beta, g)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options: Any = {"scale": scale, "normalize_qk": use_qk_l2norm_in_kernel}
    packed = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
    bounds = packed_bounds(cu_seqlens=packed, tokens=query.shape[1])
    if (router := routing.current()) is not None:  # over shards: without a cache, see hf.sharding
        more = {**options, "enable_gqa": True, "cu_seqlens": bounds}
        out = router.function("delta_rule")(*tokens, beta=gates[0], log_decay=gates[1], **more)
        return out.transpose(1, 2), None
    state = initial_state
    if state is not None:
        check_state(state, query.shape[0], value.shape[2], query.shape[3], value.shape[3])
    if bounds is not None and state is not None:
        raise ValueError("packed sequences start from nothing: pass no cache with them.")

    def described(state: Tensor | None) -> DeltaRuleCall:
        (q, k, v), (b, log_decay) = tokens, gates
        return DeltaRuleCall(q, k, v, b, log_decay, None, bounds, state, **options)

    given: list[Tensor] = [*tokens, *gates] if state is None else [*tokens, *gates, state]
    served = rule_refusal(*given) is None
    with torch.autocast(query.device.type, enabled=False):
        if served and state is not None and query.shape[1] == 1 and _writable(state) and eligible(*given):
            out, state = native.decode(described(state), state)
        else:
            rule = native.delta_rule if served else chunk.delta_rule
            state = None if state is None else state.to(dtype)
            out, state = rule(described(state))
    return out.transpose(1, 2).contiguous(), state if output_final_state else None


def _heads_first(dtype: torch.dtype, *given: Tensor) -> list[Any]:
    return [x.transpose(1, 2).to(dtype) for x in given]


def _writable(state: Tensor) -> bool:
    return state.dtype is torch.float32 and state.is_contiguous()
