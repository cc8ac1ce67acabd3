"""Exact softmax through torch's own scaled_dot_product_attention, in the same terms as the linear kernels."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..states.kv_cache import KeyValueCache
from .call import Call


def attend(
    call: Call, query: Tensor, key: Tensor, value: Tensor, state: KeyValueCache | None
) -> tuple[Tensor, KeyValueCache]:
    """(B, Hq, L, D), (B, H, S, D), (B, H, S, M) -> (B, Hq, L, M) and the keys and values so far."""
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    cache = extend(call, key, value, state)
    key, value = cache.key, cache.value
    L, S = query.shape[-2], key.shape[-2]
    gqa = bool(query.shape[1] != key.shape[1])  # torch.jit.trace makes tensors of sizes
    if S == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), cache
    if call.key_mask is None and state is None and (not call.is_causal or L == S):
        out = scaled_dot_product_attention(
            query, key, value, is_causal=call.is_causal, scale=call.scale, enable_gqa=gqa
        )
        return out, cache
    table = cache.visible[:, None, None, :]  # (B, 1, 1, S)
    if call.is_causal:
        table = table & torch.ones(L, S, dtype=torch.bool, device=key.device).tril(S - L)
    table = table.expand(-1, -1, L, -1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=table, scale=call.scale, enable_gqa=gqa)
    return out.masked_fill(~table.any(-1, keepdim=True), 0), cache


def extend(call: Call, key: Tensor, value: Tensor, state: KeyValueCache | None) -> KeyValueCache:
    """The cache with these keys and values behind it."""
    visible = call.key_mask
    if visible is None:
        visible = torch.ones(key.shape[0], key.shape[-2], dtype=torch.bool, device=key.device)
    if state is not None:
        key, value = (torch.cat([old.to(new.dtype), new], -2) for old, new in ((state.key, key), (state.value, value)))
        visible = torch.cat([state.visible, visible], -1)
    return KeyValueCache(kernel=call.signature, key=key, value=value, visible=visible)
