"""Tokens on a grid of absolute blocks, so that a sequence gives the same numbers however it is cut into calls.

Positions count visible tokens, so padding moves nothing. Rows of a batch may stand at different positions; each has its own
grid, whose first block is the one that its next token falls into.
"""

import torch
from torch import Tensor


class Grid:
    """Where the new tokens of a call lie: `counts[b]` visible ones of L, after `seen[b]` that came before."""

    def __init__(self, seen: list[int], counts: list[int], tokens: int, block: int, device: torch.device):
        self.seen, self.counts, self.tokens, self.block = seen, counts, tokens, block
        self.phases = [s % block for s in seen]
        self.blocks = max((-(-(p + n) // block) for p, n in zip(self.phases, counts)), default=0)
        self.uniform = len(set(zip(self.phases, counts))) <= 1 and all(n == tokens for n in counts)
        self.device = device

    def _column(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device).unsqueeze(-1)

    def starts(self) -> Tensor:
        """(B, blocks): the position at which each block of the grid begins."""
        base = self._column([s - p for s, p in zip(self.seen, self.phases)])
        return base + torch.arange(self.blocks, device=self.device) * self.block

    def ends(self) -> Tensor:
        """(B, 1): the position after the last new token."""
        return self._column([s + n for s, n in zip(self.seen, self.counts)])

    def place(self, x: Tensor, before: int, length: int) -> Tensor:
        """Tokens (.., T, E) whose last `self.tokens` are new -> (.., length, E) from `before` positions ahead of the grid on.

        Where there is no token the numbers mean nothing.
        """
        old = x.shape[-2] - self.tokens
        if self.uniform:
            first = old - self.phases[0] - before  # index in x of the first cell
            last = first + length
            cut = x[..., max(0, first) : max(0, min(last, x.shape[-2])), :]
            left = min(length, max(0, -first))
            right = length - left - cut.shape[-2]
            return torch.nn.functional.pad(cut, (0, 0, left, right)) if left or right else cut
        first_column = self._column([old - p - before for p in self.phases])
        return take_tokens(x, first_column + torch.arange(length, device=self.device))

    def collect(self, x: Tensor) -> Tensor:
        """(.., blocks * block, E) on the grid -> (.., tokens, E), the new tokens."""
        if self.uniform:
            return x[..., self.phases[0] : self.phases[0] + self.tokens, :]
        return take_tokens(x, self._column(self.phases) + torch.arange(self.tokens, device=self.device))

    def last(self, x: Tensor, size: int) -> Tensor:
        """The last `size` tokens of (.., T, E), each row ending at its own last visible one."""
        size = min(size, x.shape[-2])
        if self.uniform:
            return x[..., x.shape[-2] - size :, :]
        first = self._column([x.shape[-2] - self.tokens + n - size for n in self.counts])
        return take_tokens(x, first + torch.arange(size, device=self.device))


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gathers (B, .., T, E) by (B, t) along the tokens; an index outside gives an end token."""
    if x.shape[-2] == 0:
        return x.new_zeros(*x.shape[:-2], index.shape[-1], x.shape[-1])
    index = index.clamp(0, x.shape[-2] - 1).reshape(index.shape[0], *[1] * (x.dim() - 3), -1, 1)
    return x.gather(-2, index.expand(*x.shape[:-2], -1, x.shape[-1]))


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L) -> the order that brings visible tokens first, and its inverse."""
    order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
    return order, order.argsort(-1)
