"""Heads over processes: an all-to-all gives each process all tokens of some heads, and another one gives the rows back.

For attention that needs all tokens of a head in one place. Exactly what one process computes; bytes grow with the tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .groups import Members
from .messages import exchange_parts


def share(heads: int, who: Members) -> list[int]:
    """How many heads each process gets: as even as can be; processes beyond the heads get none."""
    return [heads // who.size + (rank < heads % who.size) for rank in range(who.size)]


def to_heads(x: Tensor, heads: Sequence[int], lengths: Sequence[int], who: Members) -> Tensor:
    """(B, H, tokens of this process, D) -> (B, heads of this process, all tokens, D)."""
    return _Scatter.apply(x, True, list(heads), list(lengths), who)


def to_tokens(x: Tensor, heads: Sequence[int], lengths: Sequence[int], who: Members) -> Tensor:
    """The inverse of `to_heads`."""
    return _Scatter.apply(x, False, list(heads), list(lengths), who)


def _scatter_heads(x: Tensor, heads: list[int], lengths: list[int], who: Members, kind: str) -> Tensor:
    B, _, _, D = x.shape
    mine = heads[who.rank]
    found = exchange_parts(x.split(heads, 1), [B * mine * n * D for n in lengths], who, kind=kind)
    return torch.cat([part.view(B, mine, n, D) for part, n in zip(found, lengths, strict=True)], 2)


def _scatter_tokens(x: Tensor, heads: list[int], lengths: list[int], who: Members, kind: str) -> Tensor:
    B, _, _, D = x.shape
    mine = lengths[who.rank]
    found = exchange_parts(x.split(lengths, 2), [B * h * mine * D for h in heads], who, kind=kind)
    return torch.cat([part.view(B, h, mine, D) for part, h in zip(found, heads, strict=True)], 1)


class _Scatter(torch.autograd.Function):
    """Tokens of all heads -> heads of all tokens, or the inverse; each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_heads: bool, heads: list[int], lengths: list[int], who: Members) -> Tensor:
        ctx.call = by_heads, heads, lengths, who
        scatter = _scatter_heads if by_heads else _scatter_tokens
        return scatter(x, heads, lengths, who, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_heads, heads, lengths, who = ctx.call
        scatter = _scatter_tokens if by_heads else _scatter_heads
        return scatter(grad, heads, lengths, who, "backward"), None, None, None, None


def gather_tokens(x: Tensor, lengths: Sequence[int], who: Members) -> Tensor:
    """(B, H, tokens of this process, D) -> (B, H, all tokens, D), on every process."""
    return _GatherTokens.apply(x, list(lengths), who)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], who: Members) -> Tensor:
        ctx.call, (B, H, _, D) = (lengths, who), x.shape
        found = exchange_parts([x] * who.size, [B * H * n * D for n in lengths], who, kind="forward")
        return torch.cat([part.view(B, H, n, D) for part, n in zip(found, lengths, strict=True)], 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        lengths, who = ctx.call
        B, H, _, D = grad.shape
        mine = lengths[who.rank]
        found = exchange_parts(grad.split(lengths, 2), [B * H * mine * D] * who.size, who, kind="backward")
        return torch.stack([part.view(B, H, mine, D) for part in found]).sum(0), None, None
