"""Causal near/far attention: exact sinks and window, merged slots for the rest, one softmax over all of them.

A block of queries [t0, t0 + block) sees the sinks, the keys from t0 - window on, and slots for what lies between. Slots
take in the keys [t0 - block - window, t0 - window) when the block is entered; that recursion is the only sequential part,
and attention runs over many blocks at once. See state.py for the shapes of `Memory`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.nearfar import NearFar
from . import slots
from .grid import Grid
from .state import Memory
from .step import HIDDEN, attend_few, fill_sinks, plain, step

STRETCH = 2**19  # numbers in the logits of the blocks that are attended to at once: they should stay in cache


@dataclass
class Clock:
    """Positions of a call, the same for all heads. merged: (B,), as in NearFarState."""

    grid: Grid
    merged: list[int]
    window: int
    sinks: int

    def merged_after(self) -> list[int]:
        """Where the slots end once every block that has a token was entered."""
        block, after = self.grid.block, []
        for seen, count, merged in zip(self.grid.seen, self.grid.counts, self.merged):
            last_block = (seen + count - 1) // block * block
            after.append(max(merged, last_block - self.window) if count else merged)
        return after


def advance(
    kernel: NearFar, query: Tensor | None, entries: Tensor, memory: Memory, clock: Clock, size: int, attend: bool
) -> tuple[Tensor | None, Memory]:
    """Goes through new tokens: entries (B, H, L, E), their queries (B, H, G, L, D) or None; size is the number of slots.

    Visible tokens come first in each row. Returns (B, H, G, L, M) if `attend`, and the memory after them.
    """
    grid, block, window = clock.grid, kernel.block, kernel.window
    if grid.blocks == 0:
        out = None if query is None else query.new_zeros(*query.shape[:-1], entries.shape[-1] - query.shape[-1])
        return out, memory
    if query is not None and plain(grid):
        return step(kernel, query, entries, memory, grid, clock.merged)
    tokens = torch.cat([memory.near, entries], 2)
    sink = fill_sinks(memory.sink, entries, grid)
    dim = memory.moments.shape[-1] - 1
    samples, queries = _sample(kernel, query, memory, grid, dim)
    # Cells of `laid` from i * block on: what block i merges, then its window, then the block itself.
    laid = grid.place(tokens, window + block, grid.blocks * block + window + block)
    starts, ends = grid.starts(), grid.ends()
    steps = torch.arange(block, device=laid.device)
    frontier = _column(clock.merged, laid)  # (B, 1)
    incoming = (starts - window - block).unsqueeze(-1) + steps  # (B, blocks, block): positions
    fresh = (incoming >= frontier.clamp_min(kernel.sinks).unsqueeze(-1)) & (starts < ends).unsqueeze(-1)
    fresh_any, fresh_all = fresh.any(-1).any(0).tolist(), fresh.all(-1).all(0).tolist()

    pieces, far, bias, moments = [], memory.slots, memory.bias, memory.moments
    few = grid.blocks == 1 and grid.tokens < block
    laid_query = grid.place(query, 0, grid.blocks * block) if attend and query is not None and not few else None
    span = _span(kernel, entries, query, size)
    for first in range(0, grid.blocks, span):
        blocks = range(first, min(first + span, grid.blocks))
        running = []
        for i in blocks:
            moments = _add_moments(moments, samples, grid, i - 1) if i > 0 else moments
            running.append(moments)
        history = []
        anchors, metrics = _anchors(running)
        for j, i in enumerate(blocks):
            if fresh_any[i] and size > 0:
                arriving = laid[:, :, i * block : (i + 1) * block]
                shape = anchors[:, :, j], metrics[:, :, j]
                far, bias = _take_in(
                    far, bias, arriving, None if fresh_all[i] else fresh[:, i], shape, size, kernel.alpha
                )
            history.append((far, bias))
        if laid_query is not None:
            hidden = _hidden(starts[:, first : blocks.stop], frontier, kernel)
            near = laid[:, :, (first + 1) * block : (blocks.stop + 1) * block + window]
            q = laid_query[:, :, :, first * block : blocks.stop * block]
            pieces.append(_attend_blocks(q, near, hidden, sink, history, kernel))
    moments = _add_moments(moments, samples, grid, grid.blocks - 1)
    out = grid.collect(torch.cat(pieces, 3)) if pieces else None
    if attend and query is not None and few:
        out = attend_few(kernel, query, tokens, sink, far, bias, grid, clock.merged)
    near = grid.last(tokens, window + block)
    return out, replace(memory, sink=sink, near=near, slots=far, bias=bias, moments=moments, queries=queries)


def _attend_blocks(
    query: Tensor, near: Tensor, hidden: tuple[Tensor, Tensor], sink: Tensor, history: list, kernel: NearFar
) -> Tensor:
    """Queries (B, H, G, n * block, D) of n blocks, near (B, H, n * block + window, E), slots of each block: -> (.., M)."""
    B, H, G, L, D = query.shape
    n, block, reach = len(history), kernel.block, kernel.window + kernel.block
    hidden_sink, hidden_near = (h.unsqueeze(1) for h in hidden)  # (B, 1, n, sinks), (B, 1, n, window + block)
    x = query.reshape(B, H, G, n, block, D).transpose(2, 3).reshape(B, H, n, G * block, D)
    far, far_bias = _stack(history)  # (B, H, n, c, E), (B, H, n, c)
    near = near.unfold(2, reach, block).transpose(-1, -2)  # (B, H, n, reach, E)
    sink_logits = (x @ sink[..., :D].unsqueeze(2).mT).masked_fill(hidden_sink.unsqueeze(-2), HIDDEN)
    far_logits = (x @ far[..., :D].mT).add_(far_bias.unsqueeze(-2))
    near_logits = x @ near[..., :D].mT
    if bool(hidden_near.any()):
        near_logits = near_logits.masked_fill(hidden_near.unsqueeze(-2), HIDDEN)
    later = torch.ones(block, block, dtype=torch.bool, device=x.device).triu(1).repeat(G, 1)
    near_logits[..., -block:].masked_fill_(later, HIDDEN)
    weights = torch.cat([sink_logits, far_logits, near_logits], -1).softmax(-1)
    s, c = sink.shape[2], far.shape[3]
    out = weights[..., s + c :] @ near[..., D:] + weights[..., s : s + c] @ far[..., D:]
    out = out + weights[..., :s] @ sink[..., D:].unsqueeze(2)
    return out.reshape(B, H, n, G, block, -1).transpose(2, 3).reshape(B, H, G, L, -1)


def _anchors(running: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Anchor (B, H, n, 1, D) and metric (B, H, n, D, D) of the moments before each of n blocks."""
    with torch.no_grad():
        return slots.anchor_and_metric(torch.stack(running, 2))


def _take_in(
    far: Tensor,
    bias: Tensor,
    arriving: Tensor,
    fresh: Tensor | None,
    shape: tuple[Tensor, Tensor],
    size: int,
    alpha: float,
) -> tuple[Tensor, Tensor]:
    """Adds a block of keys, as slots of their own while there is room, merged into the others once there is not.

    fresh: (B, block), which of them are new keys, or None for all. shape: anchor and metric.
    """
    block, have = arriving.shape[2], far.shape[2]
    new_bias = bias.new_zeros(bias.shape[0], bias.shape[1], block)
    if fresh is not None:
        arriving = arriving.masked_fill(~fresh[:, None, :, None], 0)
        new_bias = new_bias.masked_fill(~fresh.unsqueeze(1), -torch.inf)
    if have + block <= size:
        return torch.cat([far, arriving], 2), torch.cat([bias, new_bias], 2)
    if have < size:  # every merge has the same shape, whatever the other rows of the batch hold
        far = torch.nn.functional.pad(far, (0, 0, 0, size - have))
        bias = torch.nn.functional.pad(bias, (0, size - have), value=-torch.inf)
    far, bias, _ = slots.merge(torch.cat([far, arriving], 2), torch.cat([bias, new_bias], 2), size, *shape, alpha)
    return far, bias


def _hidden(starts: Tensor, frontier: Tensor, kernel: NearFar) -> tuple[Tensor, Tensor]:
    """Which sinks (B, n, sinks) and which near keys (B, n, window + block) a block must not see at all.

    A sink inside the block itself counts as a near key there, so that the triangle of the block hides what comes later.
    """
    starts = starts.unsqueeze(-1)
    sinks = torch.arange(kernel.sinks, device=starts.device)
    position = starts - kernel.window + torch.arange(kernel.window + kernel.block, device=starts.device)
    return sinks >= starts, position < torch.maximum(starts.clamp_max(kernel.sinks), frontier.unsqueeze(-1))


def _sample(kernel: NearFar, query: Tensor | None, memory: Memory, grid: Grid, dim: int) -> tuple[Tensor, Tensor]:
    """Sampled queries with a one beside them (B, H, G, blocks, s, D + 1), zero where there is none; and the last block's."""
    stride, block = kernel.stride, kernel.block
    B, H, G, s = memory.queries.shape[:4]
    position = grid.starts().unsqueeze(-1) + torch.arange(0, block, stride, device=memory.queries.device)
    if query is None:
        laid = memory.queries.new_zeros(B, H, G, grid.blocks, s, dim + 1)
    else:
        x = grid.place(query.detach(), 0, grid.blocks * block).reshape(B, H, G, grid.blocks, block, dim)[
            ..., ::stride, :
        ]
        laid = torch.nn.functional.pad(x, (0, 1), value=1.0)
        late = (position >= grid.ends().unsqueeze(-1))[:, None, None, :, :, None]
        laid = laid.masked_fill(late, 0)
    early = position[:, :1] < torch.tensor(grid.seen, device=position.device)[:, None, None]  # (B, 1, s)
    before = torch.where(early[:, None, None, :, :, None], memory.queries.unsqueeze(3), laid[:, :, :, :1])
    laid = torch.cat([before, laid[:, :, :, 1:]], 3)
    last = torch.tensor([(p + max(n, 1) - 1) // block for p, n in zip(grid.phases, grid.counts)], device=laid.device)
    index = last.reshape(B, 1, 1, 1, 1, 1).expand(-1, H, G, 1, s, dim + 1)
    return laid, laid.gather(3, index).squeeze(3)


def _add_moments(moments: Tensor, samples: Tensor, grid: Grid, i: int) -> Tensor:
    """Adds the queries of block i where it is finished. One block at a time, so that every split adds alike."""
    x = samples[:, :, :, i].flatten(2, 3)  # (B, H, G s, D + 1)
    done = [p + n >= (i + 1) * grid.block for p, n in zip(grid.phases, grid.counts)]
    if not any(done):
        return moments
    added = x.mT @ x
    if all(done):
        return moments + added
    return torch.where(torch.tensor(done, device=x.device)[:, None, None, None], moments + added, moments)


def _stack(history: list) -> tuple[Tensor, Tensor]:
    """Slots of each block (B, H, n, c, E) and their biases, filled up with empty ones to the last block's number."""
    size = history[-1][0].shape[2]
    pad = torch.nn.functional.pad
    far = [x if x.shape[2] == size else pad(x, (0, 0, 0, size - x.shape[2])) for x, _ in history]
    bias = [b if b.shape[2] == size else pad(b, (0, size - b.shape[2]), value=-torch.inf) for _, b in history]
    return torch.stack(far, 2), torch.stack(bias, 2)


def _span(kernel: NearFar, entries: Tensor, query: Tensor | None, size: int) -> int:
    groups = 1 if query is None else query.shape[2]
    keys = kernel.sinks + size + kernel.window + kernel.block
    return max(1, STRETCH // (entries.shape[0] * entries.shape[1] * groups * kernel.block * keys))


def _column(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device).unsqueeze(-1)
