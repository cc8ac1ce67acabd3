"""Causal near/far attention: exact sinks and window, merged slots for the rest, one softmax over all of them.

A block of queries [t0, t0 + block) sees the sinks, the keys from t0 - window on, and slots for what lies between. Slots
take in the keys [t0 - block - window, t0 - window) when the block is entered; that recursion is the only sequential part,
and attention runs over many blocks at once. See state.py for the shapes of `Memory`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.nearfar import NearFar
from . import recall, slots
from .grid import Grid
from .kept import Kept
from .state import Memory
from .step import HIDDEN, attend_few, fill_sinks, plain, step

SPAN = 32  # blocks whose query statistics are worked out at once


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

    trail = None
    if memory.kept is not None:
        leaving = laid[:, :, : grid.blocks * block]
        trail = recall.Trail(memory.kept, leaving, incoming, fresh, window, dim)
    rows, far, bias, moments = [], memory.slots, memory.bias, memory.moments
    few = grid.blocks == 1 and grid.tokens < block
    laid_query = grid.place(query, 0, grid.blocks * block) if attend and query is not None and not few else None
    view = _View(kernel, starts, frontier)
    for first in range(0, grid.blocks, SPAN):
        blocks = range(first, min(first + SPAN, grid.blocks))
        running = []
        for i in blocks:
            moments = _add_moments(moments, samples, grid, i - 1) if i > 0 else moments
            running.append(moments)
        anchors, metrics = _anchors(running)
        for j, i in enumerate(blocks):
            cell = i * block
            if fresh_any[i] and size > 0:
                arriving, shape = laid[:, :, cell : cell + block], (anchors[:, :, j], metrics[:, :, j])
                far, bias = _take_in(
                    far, bias, arriving, None if fresh_all[i] else fresh[:, i], shape, size, kernel.alpha, (trail, i)
                )
            elif fresh_any[i] and trail is not None:
                trail.enter(i, 0, None)
            if laid_query is not None:
                near = laid[:, :, cell + block : cell + 2 * block + window]
                kept = None if trail is None else trail.now()
                rows.append(view.attend(i, laid_query[:, :, :, cell : cell + block], near, sink, far, bias, kept))
    moments = _add_moments(moments, samples, grid, grid.blocks - 1)
    out = grid.collect(torch.cat(rows, 3)) if rows else None
    kept = None if trail is None else trail.now()
    if attend and query is not None and few:
        out = attend_few(kernel, query, tokens, sink, far, bias, grid, clock.merged, kept)
    near = grid.last(tokens, window + block)
    after = replace(memory, sink=sink, near=near, slots=far, bias=bias, moments=moments, queries=queries, kept=kept)
    return out, after


class _View:
    """What each block of queries may see of the keys beside it.

    A sink inside a block counts as a near key there, so that the triangle of the block hides what comes later.
    """

    def __init__(self, kernel: NearFar, starts: Tensor, frontier: Tensor):
        self.block = kernel.block
        starts = starts.unsqueeze(-1)
        sinks = torch.arange(kernel.sinks, device=starts.device)
        position = starts - kernel.window + torch.arange(kernel.window + kernel.block, device=starts.device)
        self.hidden_sinks = sinks >= starts  # (B, blocks, sinks)
        self.hidden_near = position < torch.maximum(starts.clamp_max(kernel.sinks), frontier.unsqueeze(-1))
        self.hides = (self.hidden_sinks.any(-1) | self.hidden_near.any(-1)).any(0).tolist()
        self.later = torch.ones(kernel.block, kernel.block, dtype=torch.bool, device=starts.device).triu(1)

    def attend(
        self, i: int, query: Tensor, near: Tensor, sink: Tensor, far: Tensor, bias: Tensor, kept: Kept | None
    ) -> Tensor:
        """Block i: queries (B, H, G, block, D), near (B, H, window + block, E), slots (B, H, c, E): (B, H, G, block, M)."""
        B, H, G, L, D = query.shape
        x = query.reshape(B, H, G * L, D)
        sink_logits, near_logits = x @ sink[..., :D].mT, x @ near[..., :D].mT
        if self.hides[i]:
            sink_logits = sink_logits.masked_fill(self.hidden_sinks[:, None, i, None], HIDDEN)
            near_logits = near_logits.masked_fill(self.hidden_near[:, None, i, None], HIDDEN)
        near_logits.unflatten(2, (G, L))[..., -L:].masked_fill_(self.later, HIDDEN)
        far_logits = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), x.flatten(0, 1), far[..., :D].flatten(0, 1).mT)
        logits = torch.cat([sink_logits, far_logits.unflatten(0, (B, H)), near_logits], -1)
        weights = logits.softmax(-1)
        p_sink, p_far, p_near = weights.split([sink.shape[2], far.shape[2], near.shape[2]], -1)
        out = p_near @ near[..., D:] + p_far @ far[..., D:] + p_sink @ sink[..., D:]
        out = out.reshape(B, H, G, L, -1)
        return out if kept is None else recall.correct(out, logits.logsumexp(-1), query, far, bias, kept)


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
    trail: tuple[recall.Trail | None, int],
) -> tuple[Tensor, Tensor]:
    """Adds a block of keys, as slots of their own while there is room, merged into the others once there is not.

    fresh: (B, block), which of them are new keys, or None for all. shape: anchor and metric. trail: for heads with recall,
    and the number of the block.
    """
    followed, i = trail
    block, have = arriving.shape[2], far.shape[2]
    new_bias = bias.new_zeros(bias.shape[0], bias.shape[1], block)
    if fresh is not None:
        arriving = arriving.masked_fill(~fresh[:, None, :, None], 0)
        new_bias = new_bias.masked_fill(~fresh.unsqueeze(1), -torch.inf)
    if have + block <= size:
        if followed is not None:
            followed.enter(i, have, None)
        return torch.cat([far, arriving], 2), torch.cat([bias, new_bias], 2)
    if have < size:  # every merge has the same shape, whatever the other rows of the batch hold
        far = torch.nn.functional.pad(far, (0, 0, 0, size - have))
        bias = torch.nn.functional.pad(bias, (0, size - have), value=-torch.inf)
    before = torch.cat([far, arriving], 2), torch.cat([bias, new_bias], 2)
    far, bias, place = slots.merge(*before, size, *shape, alpha)
    if followed is not None:
        followed.enter(i, size, recall.follow(before, (far, bias), place, shape[0]))
    return far, bias


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


def _column(numbers: list[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device).unsqueeze(-1)
