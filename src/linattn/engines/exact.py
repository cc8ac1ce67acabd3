"""Exact softmax through torch's own scaled_dot_product_attention, in the same terms as the linear kernels."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..sums.state import Cache


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Cache | None,
    *,
    is_causal: bool,
    scale: float | None,
    key_mask: Tensor | None,
    signature: str,
) -> tuple[Tensor, Cache]:
    """(B, Hq, L, D), (B, H, S, D), (B, H, S, M) -> (B, Hq, L, M) and the keys and values so far."""
    visible = torch.ones(key.shape[0], key.shape[-2], dtype=torch.bool, device=key.device)
    if key_mask is not None:
        visible = key_mask
        hidden = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    masked = key_mask is not None
    if state is not None:
        key, value = (torch.cat([old.to(new.dtype), new], -2) for old, new in ((state.key, key), (state.value, value)))
        visible = torch.cat([state.visible, visible], -1)
        masked = True
    cache = Cache(kernel=signature, key=key, value=value, visible=visible)
    L, S = query.shape[-2], key.shape[-2]
    gqa = query.shape[1] != key.shape[1]
    if S == 0:
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), cache
    if not masked and (not is_causal or L == S):
        out = scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=gqa)
        return out, cache
    table = visible[:, None, None, :]  # (B, 1, 1, S)
    if is_causal:
        table = table & torch.ones(L, S, dtype=torch.bool, device=key.device).tril(S - L)
    table = table.expand(-1, -1, L, -1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=table, scale=scale, enable_gqa=gqa)
    return out.masked_fill(~table.any(-1, keepdim=True), 0), cache
