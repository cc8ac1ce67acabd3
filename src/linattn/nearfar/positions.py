"""Positions: how far each sequence of a batch has been read, which of its keys are merged, and in which block a token lies.

Positions count visible tokens, so padding changes nothing. Work is done in blocks at absolute positions, so a sequence gives
the same numbers however it is cut into calls. Everything that depends on the merge frontier is computed here.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Window(Protocol):
    """Which keys are exact, and when the others are merged: a NearFar kernel, or its native form."""

    @property
    def window(self) -> int: ...
    @property
    def sinks(self) -> int: ...
    @property
    def block(self) -> int: ...


class Positions(NamedTuple):
    """Where the sequences of a batch stand, one number for each.

    Attributes:
        tokens: visible tokens seen, which is the position of the next one.
        merged: the merge frontier. Keys before it are in slots, except for the sinks.
        entered: where the last block that was entered begins.
    """

    tokens: list[int]
    merged: list[int]
    entered: list[int]

    @classmethod
    def start(cls, batch: int) -> "Positions":
        return cls([0] * batch, [0] * batch, [0] * batch)

    def after(self, kernel: Window, counts: list[int]) -> "Positions":
        """After `counts` more tokens. Entering the block at position t moves the frontier to t - window."""
        block, window = kernel.block, kernel.window
        tokens = [t + n for t, n in zip(self.tokens, counts, strict=True)]
        last = [(t - 1) // block * block if n else 0 for t, n in zip(tokens, counts, strict=True)]
        merged = [max(m, start - window) for m, start in zip(self.merged, last, strict=True)]
        return Positions(tokens, merged, [max(e, start) for e, start in zip(self.entered, last, strict=True)])

    def all_exact(self, kernel: Window, budget: int, counts: list[int]) -> bool:
        """True if heads with `budget` slots have merged no two keys yet, and would not with `counts` more tokens."""
        room = kernel.sinks + budget
        most = max([0, *(t + n for t, n in zip(self.tokens, counts, strict=True))])
        return most <= room + kernel.window and max([0, *self.merged]) <= room

    def growth(self, kernel: Window, budgets: Sequence[int], used: Sequence[int], counts: list[int]) -> "Growth":
        """What `counts` more tokens add to a state with `used` slots in each head."""
        full = tuple(used) == tuple(budgets)
        grown = used if full else self.slots_after(kernel, budgets, used, counts)
        return Growth(used, grown, self.after(kernel, counts))

    def slots_after(self, kernel: Window, budgets: Sequence[int], used: Sequence[int], counts: list[int]) -> list[int]:
        """The slots of each head after `counts` more tokens, which had `used` of its budget so far."""
        pairs = list(zip(budgets, used, strict=True))
        found = {pair: self._head_slots_after(kernel, *pair, counts) for pair in set(pairs)}
        return [found[pair] for pair in pairs]

    def _head_slots_after(self, kernel: Window, budget: int, used: int, counts: list[int]) -> int:
        """One block more for each that is merged, up to the budget."""
        block, window = kernel.block, kernel.window
        starts = [t // block * block for t in self.tokens]
        ends = [t + n for t, n in zip(self.tokens, counts, strict=True)]
        while used < budget:
            entered = [start < end for start, end in zip(starts, ends, strict=True)]
            if not any(entered):
                break
            if any(
                inside and start - window > max(kernel.sinks, m)
                for inside, start, m in zip(entered, starts, self.merged, strict=True)
            ):
                used = min(used + block, budget)
            starts = [start + block for start in starts]
        return used


class Growth(NamedTuple):
    """What a call adds to a state: the slots of each head before and after it, and the positions after it."""

    used: Sequence[int]
    grown: Sequence[int]
    after: Positions


class BlockLayout:
    """The new tokens of a call on the grid of absolute blocks.

    Each sequence has a grid of its own, whose first block is the one that its next token falls into.

    Attributes:
        positions: before the call.
        counts: the visible ones among the `length` new tokens of each sequence; they come first.
        phases: the offset of the first new token in its block.
        blocks: how many blocks the new tokens touch, at most.
        uniform: True if all sequences have the same phase and no hidden tokens.
    """

    def __init__(self, positions: Positions, counts: list[int], length: int, block: int, device: torch.device):
        self.positions, self.counts, self.length, self.block = positions, counts, length, block
        self.phases = [t % block for t in positions.tokens]
        self.blocks = max([0, *(-(-(p + n) // block) for p, n in zip(self.phases, counts, strict=True))])
        self.uniform = len(set(self.phases)) <= 1 and all(n == length for n in counts)
        self.device = device

    @property
    def inside_block(self) -> bool:
        """True if all tokens fall into a block that was entered before: no key has to be merged."""
        return self.uniform and self.phases[0] > 0 and self.phases[0] + self.length <= self.block

    def block_starts(self, i: int) -> list[int]:
        """The position at which block i begins in each sequence."""
        return [t - p + i * self.block for t, p in zip(self.positions.tokens, self.phases, strict=True)]

    def entering(self, i: int) -> list[bool]:
        """Which sequences enter block i, which is not their first one."""
        rows = zip(self.positions.entered, self.block_starts(i), self.positions.tokens, self.counts, strict=True)
        return [entered < start < tokens + count for entered, start, tokens, count in rows]

    def starts(self) -> Tensor:
        """(B, blocks): the same of all blocks."""
        return self.column(self.block_starts(0)) + torch.arange(self.blocks, device=self.device) * self.block

    def ends(self) -> Tensor:
        """(B, 1): the position after the last new token."""
        return self.column([t + n for t, n in zip(self.positions.tokens, self.counts, strict=True)])

    def column(self, numbers: list[int]) -> Tensor:
        """(B, 1)."""
        return torch.tensor(numbers, device=self.device).unsqueeze(-1)

    def scatter(self, x: Tensor, before: int, length: int) -> Tensor:
        """Tokens (.., T, E), the new ones last -> (.., length, E) on the grid, from `before` positions ahead of it on.

        Cells without a token hold arbitrary finite numbers.
        """
        old = x.shape[-2] - self.length
        if self.uniform:
            first = old - self.phases[0] - before  # index in x of the first cell
            cut = x[..., max(0, first) : max(0, min(first + length, x.shape[-2])), :]
            left = min(length, max(0, -first))
            right = length - left - cut.shape[-2]
            return torch.nn.functional.pad(cut, (0, 0, left, right)) if left or right else cut
        first_column = self.column([old - p - before for p in self.phases])
        return take_tokens(x, first_column + torch.arange(length, device=self.device))

    def gather(self, x: Tensor) -> Tensor:
        """(.., blocks * block, E) on the grid -> (.., length, E), the new tokens."""
        if self.uniform:
            return x[..., self.phases[0] : self.phases[0] + self.length, :]
        return take_tokens(x, self.column(self.phases) + torch.arange(self.length, device=self.device))

    def last_tokens(self, x: Tensor, size: int) -> Tensor:
        """The last `size` tokens of (.., T, E), each sequence ending at its own last visible one."""
        size = min(size, x.shape[-2])
        if self.uniform:
            return x[..., x.shape[-2] - size :, :]
        first = self.column([x.shape[-2] - self.length + n - size for n in self.counts])
        return take_tokens(x, first + torch.arange(size, device=self.device))


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gathers tokens of (B, .., T, E) by index (B, t); an index out of range gives the first or last token."""
    if x.shape[-2] == 0:
        return x.new_zeros(*x.shape[:-2], index.shape[-1], x.shape[-1])
    index = index.clamp(0, x.shape[-2] - 1).reshape(index.shape[0], *[1] * (x.dim() - 3), -1, 1)
    return x.gather(-2, index.expand(*x.shape[:-2], -1, x.shape[-1]))


def visible_first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L) -> the order that brings visible tokens to the front, and its inverse."""
    order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
    return order, order.argsort(-1)
