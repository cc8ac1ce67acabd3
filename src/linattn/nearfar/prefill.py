"""Prefill of the torch engine: causal near/far attention, block by block.

A block of queries at the positions [t, t + block) sees the sinks, the keys from t - window on, and slots for the keys between.
When the block is entered, the keys [t - block - window, t - window) are added to the slots.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from . import recall
from .block_attention import BlockView, attend_block
from .kernel import NearFar
from .merge import merge
from .positions import BlockLayout
from .query_statistics import QueryStatistics
from .received import observe, pooled, rates
from .state import HeadGroup


def prefill(
    kernel: NearFar, group: HeadGroup, query: Tensor | None, entries: Tensor, layout: BlockLayout, *, attend: bool
) -> tuple[Tensor | None, HeadGroup]:
    """Adds new tokens (B, H, L, E), the visible ones of each sequence first, with their queries (B, H, G, L, D) or None.

    Returns the output (B, H, G, L, M) if `attend`, and the group after the tokens.
    """
    block, window = kernel.block, kernel.window
    tokens = torch.cat([group.near, entries], 2)
    statistics = QueryStatistics(kernel, group, query, layout)
    incoming = _Incoming.of_call(kernel, group, tokens, layout)
    writer = None
    if group.cache is not None:
        dim = group.moments.shape[-1] - 1
        leaving = incoming.cells[:, :, : layout.blocks * block]
        writer = recall.FarCacheWriter(group.cache, leaving, incoming.position, incoming.fresh, window, dim)
    group = replace(group, sink=fill_sinks(group.sink, entries, layout))
    short = layout.blocks == 1 and layout.length < block  # then queries need no padding to whole blocks
    blocks = layout.scatter(query, 0, layout.blocks * block) if attend and query is not None and not short else None
    rows = []
    for i, (anchor, metric) in enumerate(statistics.by_block()):
        seen = incoming.cells[:, :, i * block : (i + 1) * block + window]
        group, left = observe(kernel, group, statistics.before(i), seen, layout.block_starts(i), layout.entering(i))
        group = _enter_block(kernel, group, incoming, i, left, (anchor, metric), writer)
        if blocks is not None:
            starts = layout.block_starts(i)
            view = BlockView.of_block(kernel, layout.positions, starts, [start - window for start in starts])
            near = incoming.cells[:, :, (i + 1) * block : (i + 2) * block + window]
            rows.append(attend_block(group, blocks[:, :, :, i * block : (i + 1) * block], near, view))
    out = layout.gather(torch.cat(rows, 3)) if rows else None
    if attend and query is not None and short:
        out = attend_block(group, query, tokens, view_of_last(kernel, layout, tokens.shape[2]))
    near = layout.last_tokens(tokens, window + block)
    positions = layout.positions.after(kernel, layout.counts)
    return out, replace(group, positions=positions, near=near, moments=statistics.moments, queries=statistics.queries)


def view_of_last(kernel: NearFar, layout: BlockLayout, length: int) -> BlockView:
    """What new tokens inside one block see of `length` tokens, which they are the last of."""
    offsets = [t - (length - layout.length) for t in layout.positions.tokens]
    return BlockView.of_block(kernel, layout.positions, layout.block_starts(0), offsets)


def fill_sinks(sink: Tensor, entries: Tensor, layout: BlockLayout) -> Tensor:
    """Sinks (B, H, sinks, E) with those of the new tokens that are among the first of their sequence."""
    count = sink.shape[2]
    if count == 0 or min(layout.positions.tokens) >= count:
        return sink
    position = torch.arange(count, device=sink.device)
    index = position - layout.column(layout.positions.tokens)
    fresh = (index >= 0) & (position < layout.ends())
    index = index.clamp(0, max(0, entries.shape[2] - 1))[:, None, :, None]
    new = entries.gather(2, index.expand(-1, entries.shape[1], -1, entries.shape[3]))
    return torch.where(fresh[:, None, :, None], new, sink)


@dataclass(frozen=True)
class _Incoming:
    """The keys that leave the window as the blocks of a call are entered.

    Attributes:
        cells: (B, H, (blocks + 1) * block + window, E). From i * block on: the keys that block i merges, then its window,
            then the block itself.
        position: (B, blocks, block), of the keys that each block merges.
        fresh: (B, blocks, block), which of them are there, and were not merged before.
        any, all: by block, whether some or all are fresh.
    """

    cells: Tensor
    position: Tensor
    fresh: Tensor
    any: list[bool]
    all: list[bool]

    @staticmethod
    def of_call(kernel: NearFar, group: HeadGroup, tokens: Tensor, layout: BlockLayout) -> "_Incoming":
        block, window = kernel.block, kernel.window
        cells = layout.scatter(tokens, window + block, layout.blocks * block + window + block)
        starts = layout.starts()
        position = (starts - window - block).unsqueeze(-1) + torch.arange(block, device=cells.device)
        frontier = layout.column(group.positions.merged).clamp_min(kernel.sinks)  # (B, 1)
        fresh = (position >= frontier.unsqueeze(-1)) & (starts < layout.ends()).unsqueeze(-1)
        some, every = fresh.any(-1).any(0).tolist(), fresh.all(-1).all(0).tolist()
        return _Incoming(cells, position, fresh, some, every)


def _enter_block(
    kernel: NearFar,
    group: HeadGroup,
    incoming: _Incoming,
    i: int,
    received: Tensor,
    statistics: tuple[Tensor, Tensor],
    writer: recall.FarCacheWriter | None,
) -> HeadGroup:
    """Adds the keys that leave the window, and what they received (B, H, block, 2), to the slots.

    statistics: anchor and metric of the queries so far.
    """
    if not incoming.any[i]:
        return group
    used, moved = 0, None
    if group.budget > 0:
        used = group.slots.shape[2]
        keys = incoming.cells[:, :, i * kernel.block : (i + 1) * kernel.block]
        fresh = None if incoming.all[i] else incoming.fresh[:, i]
        group, moved = _add_slots(kernel, group, (keys, received), fresh, statistics)
        used = used if moved is None else group.budget
    return group if writer is None else replace(group, cache=writer.add_block(i, used, moved))


def _add_slots(
    kernel: NearFar,
    group: HeadGroup,
    new: tuple[Tensor, Tensor],
    fresh: Tensor | None,
    statistics: tuple[Tensor, Tensor],
) -> tuple[HeadGroup, tuple[Tensor, Tensor] | None]:
    """Adds keys (B, H, n, E) and what they received as slots of their own while there is room; else merges slots.

    fresh: (B, n), which of them are new, or None for all. Also returns where a merge moved the slots, for recall.
    """
    (keys, new_received), slots, bias, used = new, group.slots, group.bias, group.slots.shape[2]
    new_bias = bias.new_zeros(*bias.shape[:2], keys.shape[2])
    if fresh is not None:
        keys = keys.masked_fill(~fresh[:, None, :, None], 0)
        new_bias = new_bias.masked_fill(~fresh.unsqueeze(1), -torch.inf)
        new_received = new_received.masked_fill(~fresh[:, None, :, None], 0)
    received = group.received
    if used + keys.shape[2] <= group.budget:
        slots, bias = torch.cat([slots, keys], 2), torch.cat([bias, new_bias], 2)
        return replace(group, slots=slots, bias=bias, received=torch.cat([received, new_received], 2)), None
    if used < group.budget:  # every merge has the same shape, whatever the other sequences of the batch hold
        slots = torch.nn.functional.pad(slots, (0, 0, 0, group.budget - used))
        bias = torch.nn.functional.pad(bias, (0, group.budget - used), value=-torch.inf)
        received = torch.nn.functional.pad(received, (0, 0, 0, group.budget - used))
    before = torch.cat([slots, keys], 2), torch.cat([bias, new_bias], 2)
    received = torch.cat([received, new_received], 2)
    stored = partial(kernel.stored, dim=statistics[0].shape[-1])
    slots, bias, index = merge(
        *before, rates(received), group.budget, *statistics, kernel.alpha, group.scores.cap, stored
    )
    received = pooled(received, index, group.budget)
    moved = None
    if group.cache is not None:
        moved = recall.moved_slots(before, (slots, bias), index, statistics[0], group.scores.cap)
    return replace(group, slots=slots, bias=bias, received=received), moved
