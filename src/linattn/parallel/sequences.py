"""Cutting sequences into shards, positions, labels at their borders, and losses over all of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import GroupLike, Members, members
from .heads import gather_tokens
from .messages import failed, gather
from .shards import shard_lengths


def shard(x: Tensor, dim: int = 1, *, group: GroupLike = None) -> Tensor:
    """This process's part of a tensor that all hold: parts of equal length, the first ones a token longer if need be.

    group: as in linattn.parallel.attention; inside sequence_parallel, None is its group. So in all functions here.
    """
    who = members(group)
    return x.tensor_split(who.size, dim)[who.rank]


def unshard(x: Tensor, dim: int = 1, *, group: GroupLike = None) -> Tensor:
    """The parts of all processes as one tensor, on each of them; differentiable."""
    who = members(group)
    if who.size == 1:
        return x
    dim = dim % x.dim()
    lengths = shard_lengths(x.shape[dim], who, x.device)
    rows = x.movedim(dim, 0)
    flat = rows.reshape(1, 1, x.shape[dim], rows[:1].numel() if x.shape[dim] else _row_size(x, dim))
    return gather_tokens(flat, lengths, who)[0, 0].reshape(-1, *rows.shape[1:]).movedim(0, dim)


def _row_size(x: Tensor, dim: int) -> int:
    size = 1
    for i, n in enumerate(x.shape):
        size *= 1 if i == dim else n
    return size


def positions(tokens: int, *, group: GroupLike = None, device: torch.device | None = None) -> Tensor:
    """The positions (tokens,) of this process's tokens in the whole sequence."""
    who = members(group)
    start = 0
    if who.size > 1:
        start = sum(shard_lengths(tokens, who, device or torch.device("cpu"))[: who.rank])
    return torch.arange(start, start + tokens, device=device)


def next_labels(labels: Tensor, *, ignore_index: int = -100, group: GroupLike = None) -> Tensor:
    """labels (B, tokens of this process) moved by one: at each token the next one, across the borders of shards.

    The last token of the whole sequence gets ignore_index.
    """
    who = members(group)
    after = labels.new_full((labels.shape[0], 1), ignore_index)
    if who.size > 1:
        first = labels[:, :1] if labels.shape[1] else after
        found, _ = gather({"first": first, "held": torch.tensor([labels.shape[1] > 0], device=labels.device)}, who)
        later = [x["first"] for x in found[who.rank + 1 :] if bool(x["held"])]
        after = later[0] if later else after
    return torch.cat([labels[:, 1:], after], 1)[:, : labels.shape[1]]


def mean_loss(total: Tensor, count: Tensor | float, *, group: GroupLike = None) -> Tensor:
    """The mean loss over the tokens of all processes, from this process's sum of losses and number of tokens.

    Its gradients are meant to be averaged over the same processes, as DistributedDataParallel and FSDP do: the average is the
    gradient of the mean. With data parallelism, pass the group of all processes.
    """
    who = members(group)
    counted = torch.as_tensor(count, dtype=torch.float64, device=total.device)
    if who.size == 1:
        return total / counted.clamp_min(1).to(total.dtype)
    found: Tensor = _MeanLoss.apply(total, counted, who)
    return found


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, who: Members) -> Tensor:
        both = torch.stack([total.detach().double(), count])
        try:
            dist.all_reduce(both, group=who.group)
        except RuntimeError as error:
            raise failed(who, error) from error
        tokens = both[1].clamp_min(1)
        ctx.factor = float(who.size / tokens)
        return (both[0] / tokens).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None, None
