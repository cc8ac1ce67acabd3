"""Near/far attention without a causal mask: all keys are merged into slots once, and near keys are taken out of them again.

A slot c for the keys J has the share p_j of each, sum_J p_j = 1. A block of queries attends to the keys around it exactly: it
adds exp(x.y_j) and removes exp(logit_c) p_j from the slot that j went into. What is left of a slot is never negative, so no
denominator can vanish.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .biases import Scores, capped
from .block_attention import attend_entries
from .constants import HIDDEN
from .kernel import NearFar
from .merge import MergeFunction, anchor_and_metric, anchor_scores, query_moments
from .sides import FarSides, attend_both_sides

LOGITS_AT_ONCE = 2**19  # so that the logits of the blocks that are computed together stay in cache
COSTS_AT_ONCE = 2**23  # entries of the pairwise costs that are computed together
TRUST = 0.25  # in the Gaussian model of the queries, where nothing tells which keys they attended to
SEGMENT = 512  # keys among which pairs are searched: all pairs of a long sequence would be quadratic


@dataclass(frozen=True)
class Compressed:
    """All keys in a bounded number of slots.

    Attributes:
        slots, bias: (B, H, size, E) and (B, H, size).
        slot: (B, H, S), which slot each key went into.
        log_share: (B, H, S), log of its share there; -inf for a hidden key.
    """

    slots: Tensor
    bias: Tensor
    slot: Tensor
    log_share: Tensor


@dataclass(frozen=True)
class Options:
    """Of a call: the kernel's alpha, either engine's merge, and how logits are made."""

    alpha: float
    merge: MergeFunction
    scores: Scores


@dataclass(frozen=True)
class _Rule:
    """How slots are merged: the statistics of the queries, and either engine's merge."""

    anchor: Tensor
    metric: Tensor
    alpha: float
    merge: MergeFunction
    cap: float | None


def compress(query: Tensor, entries: Tensor, visible: Tensor | None, size: int, options: Options) -> Compressed:
    """Keys (B, H, S, E) into `size` slots, by halving, with the statistics of all queries (B, H, G, L, D)."""
    B, H, S, _ = entries.shape
    with torch.no_grad():
        x = pad(query.detach().flatten(2, 3), (0, 1), value=1.0)
        statistics = anchor_and_metric(query_moments(x))
        rule = _Rule(*statistics, TRUST * options.alpha, options.merge, options.scores.cap)
    own_bias = entries.new_zeros(B, H, S)
    if visible is not None:
        own_bias = own_bias.masked_fill(~visible.unsqueeze(1), -torch.inf)
    slots, bias = entries, own_bias
    slot = torch.arange(S, device=entries.device).expand(B, H, S)
    while slots.shape[2] > size:
        slots, bias, moved = _halve(slots, bias, size, rule)
        slot = moved.gather(2, slot)
    own_weight = anchor_scores(entries, rule.anchor, rule.cap) + own_bias
    weight = bias + anchor_scores(slots, rule.anchor, rule.cap)
    log_share = own_weight - weight.masked_fill(weight == -torch.inf, 0).gather(2, slot)
    return Compressed(slots, bias, slot, log_share)


def _halve(slots: Tensor, bias: Tensor, size: int, rule: _Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Half as many slots, but at least `size`, and where each slot went. Long sequences are halved segment by segment."""
    B, H, n, E = slots.shape
    segment = 2 * max(size, SEGMENT // 2)
    if n <= segment:
        return rule.merge(slots, bias, None, max(size, (n + 1) // 2), rule.anchor, rule.metric, rule.alpha, rule.cap)
    k = -(-n // segment)
    slots = pad(slots, (0, 0, 0, k * segment - n)).reshape(B, H * k, segment, E)
    bias = pad(bias, (0, k * segment - n), value=-torch.inf).reshape(B, H * k, segment)
    anchor, metric = (x.repeat_interleave(k, 1) for x in (rule.anchor, rule.metric))
    some = max(1, COSTS_AT_ONCE // (B * segment * segment))
    parts = zip(*(x.split(some, 1) for x in (slots, bias, anchor, metric)), strict=True)
    merged = [rule.merge(s, b, None, segment // 2, a, m, rule.alpha, rule.cap) for s, b, a, m in parts]
    slots, bias, moved = (torch.cat(x, 1) for x in zip(*merged, strict=True))
    moved = moved.reshape(B, H, k, segment) + torch.arange(k, device=slots.device)[:, None] * (segment // 2)
    return slots.reshape(B, H, -1, E), bias.reshape(B, H, -1), moved.reshape(B, H, -1)[..., :n]


def cross_attend(query: Tensor, entries: Tensor, visible: Tensor | None, size: int, options: Options) -> Tensor:
    """Queries (B, H, G, L, D) that have no positions among the keys (B, H, S, E): (B, H, G, L, M)."""
    far = compress(query, entries, visible, size, options)
    return attend_entries(query, far.slots, far.bias.clamp_min(HIDDEN), options.scores)[0]


def self_attend(
    kernel: NearFar, query: Tensor, entries: Tensor, visible: Tensor | None, size: int, options: Options
) -> Tensor:
    """Queries (B, H, G, N, D) of the same tokens as the keys (B, H, N, E): (B, H, G, N, M). With size 0, the window alone.

    Hidden entries must be 0.
    """
    B, H, G, N, D = query.shape
    block, reach = kernel.block, kernel.block + 2 * kernel.window
    blocks = -(-N // block)
    missing = blocks * block - N

    def around(x: Tensor, fill: float) -> Tensor:
        """(B, H, N, E) -> (B, H, blocks, reach, E): the tokens around each block."""
        padded = pad(x, (0, 0, kernel.window, kernel.window + missing), value=fill)
        return padded.unfold(2, reach, block).transpose(-1, -2)

    shown = entries.new_ones(B, 1, N) if visible is None else visible.unsqueeze(1).to(entries.dtype)
    parts = [around(entries, 0), around(shown.unsqueeze(-1), 0).squeeze(-1) == 0]
    far = None
    if size > 0:
        far = compress(query, entries, visible, size, options)
        parts.append(around(far.slot.unsqueeze(-1).to(entries.dtype), 0).squeeze(-1).long())
        parts.append(around(far.log_share.unsqueeze(-1), -torch.inf).squeeze(-1))
    x = pad(query, (0, 0, 0, missing)).reshape(B, H, G, blocks, block, D).transpose(2, 3)
    span = max(1, LOGITS_AT_ONCE // (B * H * G * block * (reach + size)))
    sides = None
    if far is not None and options.scores.table is not None:
        span, value = 1, entries[..., D:]
        sides = FarSides(size, far.slot, far.log_share, value).by_block(block, kernel.window, blocks)
    rows = []
    for i in range(0, blocks, span):
        cut = slice(i, i + span)
        near = _Near(*(part[:, :, cut] for part in parts))
        both = None if sides is None else next(sides)
        out = _attend_blocks(x[:, :, cut].flatten(3, 4), near, far, options.scores, both)
        rows.append(out.reshape(B, H, -1, G, block, entries.shape[-1] - D).transpose(2, 3).flatten(3, 4))
    return torch.cat(rows, 3)[:, :, :, :N]


@dataclass(frozen=True)
class _Near:
    """The k keys around each of s blocks: entries (B, H, s, k, E), and (B, H, s, k) which are hidden, their slot and share."""

    entries: Tensor
    hidden: Tensor
    slot: Tensor | None = None
    log_share: Tensor | None = None


def _attend_blocks(
    x: Tensor, near: _Near, far: Compressed | None, scores: Scores, sides: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Queries (B, H, s, r, D) of s blocks -> (B, H, s, r, M). sides: of one block, where biases depend on them."""
    D = x.shape[-1]
    near_key, near_value = near.entries[..., :D], near.entries[..., D:]
    near_logits = capped(x @ near_key.mT, scores.cap)
    if scores.table is not None:
        near_logits = near_logits + scores.by_position(x, near_key)
    near_logits = near_logits.masked_fill(near.hidden.unsqueeze(-2), HIDDEN)
    if far is None or near.slot is None or near.log_share is None:
        return near_logits.softmax(-1) @ near_value  # rows without a visible key are 0, as hidden entries are
    slot_logits = capped(x @ far.slots[..., :D].mT.unsqueeze(2), scores.cap) + far.bias[:, :, None, None, :]
    if sides is not None:
        return attend_both_sides(scores, slot_logits.clamp_min(HIDDEN), near_logits, near_value, sides)
    top = torch.maximum(slot_logits.detach().amax(-1, keepdim=True), near_logits.detach().amax(-1, keepdim=True))
    slot_weight, near_weight = (slot_logits - top).exp(), (near_logits - top).exp()
    share = near.log_share.exp()
    removed = slot_weight.new_zeros(*x.shape[:3], far.slots.shape[2]).scatter_add(-1, near.slot, share)
    pooled = slot_weight.gather(-1, near.slot.unsqueeze(-2).expand(*x.shape[:4], -1)) * share.unsqueeze(-2)
    total = (slot_weight * (1 - removed).clamp_min(0).unsqueeze(-2)).sum(-1, keepdim=True)
    total = total + near_weight.sum(-1, keepdim=True)
    return (slot_weight @ far.slots[..., D:].unsqueeze(2) + (near_weight - pooled) @ near_value) / total
