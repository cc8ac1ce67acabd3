"""The attention that far keys received: which of them matter is best known from what was asked for.

For every slot and every token of the window, the state keeps the attention received and the number of queries that could have
paid it, over the sampled queries of all finished blocks; older blocks count less. Both are updated when a block is entered,
with the samples of the block before it, so any split of a sequence gives the same numbers, and decoding inside a block
changes neither.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .constants import DECAY, HIDDEN
from .kernel import NearFar
from .state import HeadGroup


def rates(received: Tensor) -> Tensor:
    """Attention per query (B, H, n), 0 if there was none, of received (B, H, n, 2): attention, and queries."""
    return received[..., 0] / received[..., 1].clamp_min(1e-6)


def pooled(received: Tensor, index: Tensor, size: int) -> Tensor:
    """(B, H, size, 2) after a merge that moved the slots of (B, H, n, 2) to index (B, H, n): the sum of what they received."""
    attention, queries = (x.new_zeros(*x.shape[:2], size) for x in received.unbind(-1))
    attention = attention.scatter_add(2, index, received[..., 0])
    return torch.stack([attention, queries.scatter_reduce(2, index, received[..., 1], "amax")], -1)


@torch.no_grad()
def observe(
    kernel: NearFar, group: HeadGroup, samples: Tensor, near: Tensor, starts: list[int], entered: list[bool]
) -> tuple[HeadGroup, Tensor]:
    """Updates a group as it enters the blocks at `starts`, in the sequences that enter one.

    samples: (B, H, G, s, D + 1), of the block before. near: (B, H, window + block, E), the tokens that it saw: its window,
    and its own. Also returns what the first `block` of them, which leave the window, received: (B, H, block, 2).
    """
    block, D = kernel.block, samples.shape[-1] - 1
    known = torch.nn.functional.pad(group.near_received, (0, 0, 0, block))  # (B, H, window + block, 2)
    if group.budget == 0 or not any(entered):
        return group, known[:, :, :block]
    attention, queries = _paid(kernel, group, samples, near, starts)
    sinks, slots = attention.shape[-1] - group.slots.shape[2] - near.shape[2], group.slots.shape[2]
    total = samples[..., D].sum((2, 3)).unsqueeze(-1) * (group.bias > -torch.inf)
    received = DECAY * group.received + torch.stack([attention[..., sinks : sinks + slots], total], -1)
    known = DECAY * known + torch.stack([attention[..., sinks + slots :], queries], -1)
    left, kept = known[:, :, :block], known[:, :, block:]
    if not all(entered):
        which = torch.tensor(entered, device=near.device)[:, None, None, None]
        received = torch.where(which, received, group.received)
        kept = torch.where(which, kept, group.near_received)
    return replace(group, received=received, near_received=kept), left


def _paid(kernel: NearFar, group: HeadGroup, samples: Tensor, near: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    """The attention (B, H, sinks + slots + T) that all samples together paid, and the samples (B, H, T) that saw a token."""
    block, window, device = kernel.block, kernel.window, near.device
    G, D = samples.shape[2], samples.shape[4] - 1
    x, weight = samples[..., :D].flatten(2, 3), samples[..., D].flatten(2, 3)
    own = torch.tensor([start - block for start in starts], device=device).unsqueeze(
        -1
    )  # (B, 1), where the block begins
    merged = torch.tensor(group.positions.merged, device=device).unsqueeze(-1)
    sinks = torch.arange(kernel.sinks, device=device)
    token = torch.arange(window + block, device=device)
    first = torch.maximum(own.clamp(0, kernel.sinks), merged) - own + window  # of the tokens that are visible
    sampled = window + torch.arange(0, block, kernel.stride, device=device).repeat(G)
    hidden = (token < first).unsqueeze(1) | (token > sampled.unsqueeze(-1))  # (B, G s, T)
    logits = torch.cat(
        [
            group.scores.logits(x, group.sink[..., :D]).masked_fill((sinks >= own)[:, None, None, :], HIDDEN),
            group.scores.logits(x, group.slots[..., :D], group.bias),
            group.scores.logits(x, near[..., :D]).masked_fill(hidden.unsqueeze(1), HIDDEN),
        ],
        -1,
    )
    attention = (weight.unsqueeze(2) @ logits.softmax(-1)).squeeze(2)
    return attention, (weight.unsqueeze(2) @ (~hidden).unsqueeze(1).to(weight.dtype)).squeeze(2)
