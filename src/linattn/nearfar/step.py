"""A few tokens inside one block: what generation does, one token at a time."""

import torch
from torch import Tensor

from ..kernels.nearfar import NearFar
from . import recall
from .grid import Grid
from .kept import Kept
from .state import Memory

HIDDEN = -1e30  # finite, so that a row that belongs to no token is not NaN


def attend_few(
    kernel: NearFar,
    query: Tensor,
    tokens: Tensor,
    sink: Tensor,
    far: Tensor,
    bias: Tensor,
    grid: Grid,
    merged: list[int],
    kept: Kept | None,
) -> Tensor:
    """Queries (B, H, G, L, D) of the last L of the tokens (B, H, T, E), slots as the block sees them: (B, H, G, L, M)."""
    B, H, G, L, D = query.shape
    T = tokens.shape[2]
    starts = [s - p for s, p in zip(grid.seen, grid.phases)]
    # Sinks inside the block itself count as near keys, which the order of tokens hides where it must.
    least = [max(min(t, kernel.sinks), t - kernel.window, m) for t, m in zip(starts, merged)]
    firsts = [low - (seen - (T - L)) for low, seen in zip(least, grid.seen)]  # index of the first near key
    first, sinks = min(firsts), min(kernel.sinks, max(starts))
    near = tokens[:, :, first:]
    x = query.reshape(B, H, G * L, D)
    near_logits = x @ near[..., :D].mT
    if L > 1 or max(firsts) > first:
        index = torch.arange(first, T, device=x.device)
        hidden = index < torch.tensor(firsts, device=x.device)[:, None, None]
        hidden = hidden | (index > torch.arange(T - L, T, device=x.device).unsqueeze(-1))  # (B, L, T - first)
        near_logits = near_logits.masked_fill(hidden.repeat(1, G, 1).unsqueeze(1), HIDDEN)
    sink_logits = x @ sink[:, :, :sinks, :D].mT
    if min(starts) < sinks:
        late = torch.arange(sinks, device=x.device) >= torch.tensor(starts, device=x.device).unsqueeze(-1)
        sink_logits = sink_logits.masked_fill(late[:, None, None, :], HIDDEN)
    far_logits = x @ far[..., :D].mT + bias.unsqueeze(2)
    logits = torch.cat([sink_logits, far_logits, near_logits], -1)
    weights = logits.softmax(-1)
    p_sink, p_far, p_near = weights.split([sinks, far.shape[2], near.shape[2]], -1)
    out = p_sink @ sink[:, :, :sinks, D:] + p_far @ far[..., D:] + p_near @ near[..., D:]
    out = out.reshape(B, H, G, L, -1)
    return out if kept is None else recall.correct(out, logits.logsumexp(-1), query, far, bias, kept)


def plain(grid: Grid) -> bool:
    """Whether all rows stand alike, inside a block that was entered before and is not left."""
    return grid.uniform and grid.phases[0] > 0 and grid.phases[0] + grid.tokens <= grid.block


def step(
    kernel: NearFar, query: Tensor, entries: Tensor, memory: Memory, grid: Grid, merged: list[int]
) -> tuple[Tensor, Memory]:
    """`causal.advance` for the `plain` case, where nothing is merged."""
    phase, L, stride = grid.phases[0], grid.tokens, kernel.stride
    tokens = torch.cat([memory.near, entries], 2)
    sink = memory.sink
    if min(grid.seen) < kernel.sinks:
        sink = fill_sinks(sink, entries, grid)
    out = attend_few(kernel, query, tokens, sink, memory.slots, memory.bias, grid, merged, memory.kept)
    queries, moments = memory.queries, memory.moments
    skip = -phase % stride
    if skip < L:
        x = query.detach()[..., skip::stride, :]
        first = (phase + skip) // stride
        queries = queries.clone()
        queries[..., first : first + x.shape[3], :] = torch.nn.functional.pad(x, (0, 1), value=1.0)
    if phase + L == grid.block:
        samples = queries.flatten(2, 3)
        moments = moments + samples.mT @ samples
    near = tokens[:, :, max(0, tokens.shape[2] - kernel.window - kernel.block) :]
    return out, Memory(sink, near, memory.slots, memory.bias, moments, queries, memory.kept)


def fill_sinks(sink: Tensor, entries: Tensor, grid: Grid) -> Tensor:
    """Sinks (B, H, sinks, E) with those of the new tokens that are among the first of their row."""
    count = sink.shape[2]
    if count == 0 or min(grid.seen) >= count:
        return sink
    position = torch.arange(count, device=sink.device)
    seen = torch.tensor(grid.seen, device=sink.device).unsqueeze(-1)
    index = position - seen
    fresh = (index >= 0) & (position < grid.ends())
    index = index.clamp(0, max(0, entries.shape[2] - 1))[:, None, :, None]
    new = entries.gather(2, index.expand(-1, entries.shape[1], -1, entries.shape[3]))
    return torch.where(fresh[:, None, :, None], new, sink)
