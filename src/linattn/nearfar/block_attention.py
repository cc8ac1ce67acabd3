"""Softmax of queries over sinks, slots and near keys: the forms that the torch engine is made of.

Shapes are those of state.py: queries (B, H, G, L, D), entries (B, H, n, E) are keys beside values, output (B, H, G, L, M).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import recall
from .biases import Scores
from .constants import HIDDEN
from .kernel import NearFar
from .positions import Positions
from .state import HeadGroup


@dataclass(frozen=True)
class BlockView:
    """What the queries of one block may see, one number for each sequence.

    Attributes:
        first: index of the first near token that is visible. Later ones are, up to the query itself.
        sinks: how many sinks are visible. Sinks inside the block itself count as near tokens.
    """

    first: list[int]
    sinks: list[int]

    @staticmethod
    def of_block(kernel: NearFar, positions: Positions, starts: list[int], offsets: list[int]) -> "BlockView":
        """Of the block at position `starts`; `offsets` are the positions of the near tokens' index 0."""
        sinks = [min(start, kernel.sinks) for start in starts]
        first = [
            max(sink, start - kernel.window, merged) - offset
            for sink, start, merged, offset in zip(sinks, starts, positions.merged, offsets, strict=True)
        ]
        return BlockView(first, sinks)


def attend_block(group: HeadGroup, query: Tensor, tokens: Tensor, view: BlockView) -> Tensor:
    """Causal attention of one block: queries of the last L of the near tokens (B, H, T, E), and the sinks and slots of `group`.

    The result includes recall for heads that have it.
    """
    B, H, G, L, D = query.shape
    first, sinks = min(*view.first, tokens.shape[2] - L), max(view.sinks)
    near, sink, slots = tokens[:, :, first:], group.sink[:, :, :sinks], group.slots
    x, scores = query.reshape(B, H, G * L, D), group.scores
    near_logits = scores.logits(x, near[..., :D])
    if L > 1:
        later = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        near_logits.unflatten(2, (G, L))[..., -L:].masked_fill_(later, HIDDEN)
    if max(view.first) > first:
        index = torch.arange(first, tokens.shape[2], device=x.device)
        near_logits = near_logits.masked_fill(_rows(index < _column(view.first, x)), HIDDEN)
    sink_logits = scores.logits(x, sink[..., :D])
    if min(view.sinks) < sinks:
        index = torch.arange(sinks, device=x.device)
        sink_logits = sink_logits.masked_fill(_rows(index >= _column(view.sinks, x)), HIDDEN)
    slot_logits = scores.logits(x, slots[..., :D], group.bias)
    logits = torch.cat([sink_logits, slot_logits, near_logits], -1)
    p_sink, p_slot, p_near = logits.softmax(-1).split([sinks, slots.shape[2], near.shape[2]], -1)
    out = p_near @ near[..., D:] + p_slot @ slots[..., D:] + p_sink @ sink[..., D:]
    out = out.reshape(B, H, G, L, out.shape[-1])
    return out if group.cache is None else recall.correct(out, logits.logsumexp(-1), query, group, group.cache)


def attend_state(group: HeadGroup, query: Tensor) -> Tensor:
    """Attention to all keys that a state holds, without positions; 0 for sequences that hold none."""
    held = torch.cat([group.sink, group.slots, group.near], 2)
    sinks, slots = group.sink.shape[2], group.slots.shape[2]
    valid = valid_entries(group)
    bias = held.new_zeros(()).masked_fill(~valid, HIDDEN).unsqueeze(1).expand(-1, held.shape[1], -1)
    bias = torch.cat([bias[..., :sinks], group.bias, bias[..., sinks + slots :]], -1)  # (B, H, n)
    out, logits = attend_entries(query, held, bias, group.scores)
    out = out.masked_fill(~valid.any(-1)[:, None, None, None, None], 0)
    return out if group.cache is None else recall.correct(out, logits.logsumexp(-1), query, group, group.cache)


def attend_entries(query: Tensor, entries: Tensor, bias: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Softmax over entries with biases (B, H, n): the output, and the logits (B, H, G L, n)."""
    D = query.shape[-1]
    logits = scores.logits(query.flatten(2, 3), entries[..., :D], bias)
    out = (logits.softmax(-1) @ entries[..., D:]).unflatten(2, query.shape[2:4])
    return out, logits


def attend_exact(
    group: HeadGroup, query: Tensor, entries: Tensor, visible: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Softmax by torch's own operator while no two keys were merged: over what the state holds, and new tokens (B, H, S, E).

    visible: (B, S), which new tokens may be seen, or None for all. Causal is aligned at the last token.
    """
    B, H, G, L, D = query.shape
    x, S = query.flatten(1, 2), entries.shape[2]
    valid = valid_entries(group) if any(group.positions.tokens) else None
    tokens = entries if valid is None else torch.cat([group.sink, group.slots, group.near, entries], 2)
    key, value = (t.contiguous() for t in (tokens[..., :D], tokens[..., D:]))
    if tokens.shape[2] == 0:
        return query.new_zeros(B, H, G, L, value.shape[-1])
    if group.scores.plain and valid is None and visible is None and (not is_causal or L == S):
        out = scaled_dot_product_attention(x, key, value, is_causal=is_causal, scale=1.0, enable_gqa=bool(G > 1))
        return out.reshape(B, H, G, L, value.shape[-1])
    mask = torch.ones(L, S, dtype=torch.bool, device=x.device)
    mask = (mask.tril(S - L) if is_causal else mask).expand(B, 1, L, S)
    if visible is not None:
        mask = mask & _rows(visible)
    if valid is not None:
        mask = torch.cat([_rows(valid).expand(-1, -1, L, -1), mask], -1)
    if group.scores.plain:
        out = scaled_dot_product_attention(x, key, value, attn_mask=mask, scale=1.0, enable_gqa=bool(G > 1))
    else:
        logits = group.scores.logits(query.flatten(2, 3), key).unflatten(2, (G, L))
        out = logits.masked_fill(~mask.unsqueeze(1), HIDDEN).softmax(-1).flatten(1, 2) @ value.repeat_interleave(G, 1)
    return out.masked_fill(~mask.any(-1, keepdim=True), 0).reshape(B, H, G, L, value.shape[-1])


def valid_entries(group: HeadGroup) -> Tensor:
    """(B, sinks + c + T): which sinks, slots (of the first head) and near tokens hold a key that no other place holds.

    Sinks that are still among the near tokens count there.
    """
    device, sinks, near = group.near.device, group.sink.shape[2], group.near.shape[2]
    tokens, merged = (_column(n, group.near) for n in (group.positions.tokens, group.positions.merged))
    near_position = tokens - near + torch.arange(near, device=device)
    sink_position = torch.arange(sinks, device=device)
    sink_valid = (sink_position < tokens) & (sink_position < torch.maximum(tokens - near, merged))
    near_valid = (near_position >= 0) & (near_position >= merged)
    return torch.cat([sink_valid, group.bias[:, 0] > -torch.inf, near_valid], -1)


def _column(numbers: list[int], like: Tensor) -> Tensor:
    """(B, 1)."""
    return torch.tensor(numbers, device=like.device).unsqueeze(-1)


def _rows(mask: Tensor) -> Tensor:
    """(B, n) -> (B, 1, 1, n): the same for all heads and queries."""
    return mask[:, None, None, :]
