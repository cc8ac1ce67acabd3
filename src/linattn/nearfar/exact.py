"""Exact softmax over everything a memory holds: right, and cheapest, while no two keys were merged."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .state import Memory


def live(memory: Memory, tokens: Tensor, merged: Tensor) -> Tensor:
    """(B, sinks + c + T): which of the sinks, slots (of the first head) and near tokens hold something of their own.

    tokens and merged: (B,), as in NearFarState. Sinks that are still among the near tokens count there.
    """
    sinks, near = memory.sink.shape[2], memory.near.shape[2]
    tokens, merged = tokens.unsqueeze(-1), merged.unsqueeze(-1)
    ends = tokens - near  # position of the first near token
    position = ends + torch.arange(near, device=tokens.device)
    kept = torch.arange(sinks, device=tokens.device)
    sink_live = (kept < tokens) & (kept < torch.maximum(ends, merged))
    near_live = (position >= 0) & (position >= merged)
    return torch.cat([sink_live, memory.bias[:, 0] > -torch.inf, near_live], -1)


def attend(
    query: Tensor, entries: Tensor, visible: Tensor | None, memory: Memory, alive: Tensor | None, causal: bool
) -> Tensor:
    """Queries (B, H, G, L, D) against new tokens (B, H, S, E) and, with `alive`, the memory before them: (B, H, G, L, M).

    visible: (B, S), which new tokens may be seen, or None for all. alive: see `live`. Causal is aligned at the last token.
    """
    B, H, G, L, D = query.shape
    x, S = query.flatten(1, 2), entries.shape[2]
    tokens = entries if alive is None else torch.cat([memory.sink, memory.slots, memory.near, entries], 2)
    key, value = (t.contiguous() for t in (tokens[..., :D], tokens[..., D:]))
    if tokens.shape[2] == 0:
        return query.new_zeros(B, H, G, L, value.shape[-1])
    if alive is None and visible is None and (not causal or L == S):
        out = scaled_dot_product_attention(x, key, value, is_causal=causal, scale=1.0, enable_gqa=G > 1)
        return out.unflatten(1, (H, G))
    table = torch.ones(L, S, dtype=torch.bool, device=x.device)
    table = (table.tril(S - L) if causal else table).expand(B, 1, L, S)
    if visible is not None:
        table = table & visible[:, None, None, :]
    if alive is not None:
        table = torch.cat([alive[:, None, None, :].expand(-1, -1, L, -1), table], -1)
    out = scaled_dot_product_attention(x, key, value, attn_mask=table, scale=1.0, enable_gqa=G > 1)
    return out.masked_fill(~table.any(-1, keepdim=True), 0).unflatten(1, (H, G))
