"""MiniMax's lightning attention: sums that every head forgets at a fixed rate."""

from typing import Any

import torch
from torch import Tensor, nn

from ...engines.native import decayed_sums as native
from ...engines.native.plans import eligible
from ...engines.plan import rule_refusal
from ...functional import routing
from ...kernels.base import compute_dtype
from ...ops.decayed_sums import chunk
from ...ops.decayed_sums.call import DecayedSumsCall
from .packing import packed_bounds
from .state_checks import check_state

CLASS = "MiniMaxLightningAttention"


class LightningForward:
    """Stands in for `forward` on one layer of lightning attention."""

    def __init__(self, module: nn.Module):
        self.module: Any = module

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """(B, T, width) -> (B, T, width) and the state (B, heads, dim, dim)."""
        own = self.module
        if not hidden_states.is_cpu:
            rest = (position_embeddings, attention_mask, past_key_values)
            return type(own).forward(own, hidden_states, *rest, **kwargs)
        B, T, _ = hidden_states.shape
        mixed = own.act_fn(own.qkv_proj(hidden_states))
        if attention_mask is not None:
            mixed = (mixed * attention_mask[:, :, None]).to(mixed.dtype)
        mixed = mixed.reshape(B, T, own.num_attention_heads, 3 * own.head_dim).transpose(1, 2)
        query, key, value = mixed.split(own.head_dim, dim=-1)
        dtype = compute_dtype(mixed.dtype)
        log_decay = -own.slope_rate.to(dtype).reshape(1, -1, 1).expand(B, -1, T)
        state = None if past_key_values is None else past_key_values.get_linear_cache(own.layer_idx)
        if state is not None:
            check_state(state, B, own.num_attention_heads, own.head_dim, own.head_dim)
        bounds = packed_bounds(kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q"), T)
        out, state = _sums(query, key, value, log_decay, bounds, None if state is None else state.to(dtype))
        out = own.norm(out.transpose(1, 2).reshape(B, T, -1))
        out = own.out_proj(torch.sigmoid(own.output_gate(hidden_states)) * out)
        if past_key_values is not None:
            past_key_values.set_linear_cache(own.layer_idx, state)
        return out, state


def _sums(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, bounds: list[int] | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(B, heads, T, dim) and the state; one token without gradients is written into the old one."""
    if (router := routing.current()) is not None:  # over shards: without a cache, see hf.sharding
        more = {"scale": 1.0, "enable_gqa": True, "cu_seqlens": bounds}
        out, final = router.function("decayed_sums")(query, key, value, log_decay=log_decay, **more)
        return out, final.S
    given = [x for x in (query, key, value, log_decay, state) if x is not None]
    served = rule_refusal(*given) is None
    with torch.autocast(query.device.type, enabled=False):
        if served and state is not None and state.is_contiguous() and query.shape[2] == 1 and eligible(*given):
            return native.decode(DecayedSumsCall(query, key, value, log_decay, state=state), state)
        rule = native.decayed_sums if served else chunk.decayed_sums
        return rule(DecayedSumsCall(query, key, value, log_decay, None, bounds, state))
