"""The kv heads of a call that have equally many slots, and which form of the algorithm serves them."""

import torch
from torch import Tensor

from ..kernels.nearfar import NearFar
from . import causal, exact, full, recall, slots
from .grid import Grid, compact, take_tokens
from .state import Memory
from .step import HIDDEN


class Part:
    """A memory with its position in each row of the batch; every method leaves both as they are after its tokens.

    tokens, merged: as in NearFarState, one number per row. merge: what the form without a causal mask merges with.
    """

    def __init__(
        self,
        kernel: NearFar,
        size: int,
        memory: Memory,
        tokens: list[int],
        merged: list[int],
        merge: full.Merge = slots.merge,
    ):
        self.kernel, self.size, self.memory, self.merge = kernel, size, memory, merge
        self.tokens, self.merged = list(tokens), list(merged)

    def fits(self, counts: list[int]) -> bool:
        return fits(self.kernel, self.size, self.tokens, self.merged, counts)

    def causal(self, query: Tensor, entries: Tensor, visible: Tensor | None, want_state: bool) -> Tensor:
        """Queries (B, H, G, L, D) at the last of the keys (B, H, S, E): (B, H, G, L, M)."""
        L, S = query.shape[3], entries.shape[2]
        few = L < S and self.kernel.window + self.size >= L and max(self.tokens, default=0) == 0
        if self.fits(_counts(entries, visible)) or (few and not want_state):
            out = self._exactly(query, entries, visible, is_causal=True)
            if want_state:
                self._keys_before(entries, visible, S - L)
                self._walk(query[..., max(0, L - S) :, :], *_after(entries, visible, S - L), attend=False)
            return out
        self._keys_before(entries, visible, S - L)
        early = [self.read(query[..., : L - S, :])] if L > S else []
        late = self._walk(query[..., max(0, L - S) :, :], *_after(entries, visible, S - L), attend=True)
        assert late is not None
        return torch.cat([*early, late], 3) if early else late

    def whole(self, query: Tensor, entries: Tensor, visible: Tensor | None) -> Tensor:
        """Queries (B, H, G, L, D) that see all keys (B, H, S, E), of a memory that is still empty."""
        L, S, kernel = query.shape[3], entries.shape[2], self.kernel
        room = kernel.window + kernel.sinks + self.size
        if self.fits(_counts(entries, visible)) or room >= L:
            return self._exactly(query, entries, visible, is_causal=False)
        if self.memory.kept is not None:
            raise ValueError(
                "recall serves causal attention, and queries that read a state: without is_causal pass NearFar(recall=0)."
            )
        if L != S:
            return full.cross(query, entries, visible, room, kernel.alpha, self.merge)
        if visible is None:
            return full.attend(kernel, query, entries, None, self.size, self.merge)
        order, back = compact(visible)
        moved = (take_tokens(query, order), take_tokens(entries, order), visible.gather(1, order))
        return take_tokens(full.attend(kernel, *moved, self.size, self.merge), back)

    def absorb(self, query: Tensor, entries: Tensor, visible: Tensor | None) -> None:
        """Takes keys in for queries that are not at their places; those only say what the keys will be asked for."""
        x = torch.nn.functional.pad(query.detach().flatten(2, 3), (0, 1), value=1.0)
        self.memory.moments = self.memory.moments + x.mT @ x
        self._walk(None, entries, visible, attend=False)

    def read(self, query: Tensor) -> Tensor:
        """What queries (B, H, G, L, D) get from all keys so far; rows that saw none are 0."""
        B, H, G, L, D = query.shape
        memory = self.memory
        held = torch.cat([memory.sink, memory.slots, memory.near], 2)
        sinks, c = memory.sink.shape[2], memory.slots.shape[2]
        alive = self._alive()
        bias = held.new_zeros(()).masked_fill(~alive, HIDDEN).unsqueeze(1).expand(-1, H, -1)
        bias = torch.cat([bias[..., :sinks], memory.bias, bias[..., sinks + c :]], -1)  # (B, H, K)
        logits = query.flatten(2, 3) @ held[..., :D].mT + bias.unsqueeze(2)
        blind = ~alive.any(-1)[:, None, None, None]
        out = (logits.softmax(-1) @ held[..., D:]).masked_fill(blind, 0).reshape(B, H, G, L, -1)
        if memory.kept is None:
            return out
        return recall.correct(out, logits.logsumexp(-1), query, memory.slots, memory.bias, memory.kept)

    def _exactly(self, query: Tensor, entries: Tensor, visible: Tensor | None, is_causal: bool) -> Tensor:
        alive = self._alive() if any(self.tokens) else None
        return exact.attend(query, entries, visible, self.memory, alive, is_causal)

    def _alive(self) -> Tensor:
        device = self.memory.near.device
        return exact.live(
            self.memory, torch.tensor(self.tokens, device=device), torch.tensor(self.merged, device=device)
        )

    def _keys_before(self, entries: Tensor, visible: Tensor | None, count: int) -> None:
        if count > 0:
            self._walk(None, entries[:, :, :count], None if visible is None else visible[:, :count], attend=False)

    def _walk(self, query: Tensor | None, entries: Tensor, visible: Tensor | None, *, attend: bool) -> Tensor | None:
        """Goes on by the given tokens, in position. Queries at tokens that are not visible get 0."""
        counts, back = _counts(entries, visible), None
        if visible is not None and min(counts, default=0) < entries.shape[2]:
            order, back = compact(visible)
            entries = take_tokens(entries, order)
            query = None if query is None else take_tokens(query, order)
        grid = Grid(self.tokens, counts, entries.shape[2], self.kernel.block, entries.device)
        clock = causal.Clock(grid, self.merged, self.kernel.window, self.kernel.sinks)
        out, self.memory = causal.advance(self.kernel, query, entries, self.memory, clock, self.size, attend)
        self.merged, self.tokens = clock.merged_after(), [t + n for t, n in zip(self.tokens, counts)]
        if out is None or back is None or visible is None:
            return out
        return take_tokens(out, back).masked_fill(~visible[:, None, None, :, None], 0)


def fits(kernel: NearFar, size: int, tokens: list[int], merged: list[int], counts: list[int]) -> bool:
    """Whether no two keys of a head with `size` slots were merged so far, nor would be with so many more."""
    room, totals = kernel.sinks + size, [t + n for t, n in zip(tokens, counts)]
    return max(totals, default=0) <= room + kernel.window and max(merged, default=0) <= room


def _counts(entries: Tensor, visible: Tensor | None) -> list[int]:
    return [entries.shape[2]] * entries.shape[0] if visible is None else visible.sum(-1).tolist()


def _after(entries: Tensor, visible: Tensor | None, start: int) -> tuple[Tensor, Tensor | None]:
    start = max(0, start)
    return entries[:, :, start:], None if visible is None else visible[:, start:]
