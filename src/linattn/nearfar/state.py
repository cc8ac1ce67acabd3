"""What near/far attention keeps of the tokens seen so far: a bounded number of exact and of pooled ones."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..sums.state import State
from .kept import Kept

# Shapes: B batch, H kv heads, G query heads per kv head, D dim, M value dim. Keys are scaled by sqrt(scale) and lie beside
# their values in one tensor of width E = D + M.


@dataclass
class Memory:
    """The tensors of some kv heads that have the same number of slots. B is one dimension.

    Attributes:
        sink: (B, H, sinks, E), the tokens at positions 0, 1, ..
        near: (B, H, T, E), the last T tokens; the last one stands at position tokens - 1.
        slots: (B, H, c, E), p-weighted means of the keys and values that a slot stands for.
        bias: (B, H, c), added to x.k of the slot; 0 for a single key, -inf for an empty slot.
        moments: (B, H, D + 1, D + 1), sum of [x, 1]' [x, 1] over the sampled queries of all finished blocks.
        queries: (B, H, G, block / stride, D + 1), [x, 1] of the sampled queries of the unfinished block.
        kept: the far tokens of heads with recall.
    """

    sink: Tensor
    near: Tensor
    slots: Tensor
    bias: Tensor
    moments: Tensor
    queries: Tensor
    kept: Kept | None = None

    @staticmethod
    def empty(like: Tensor, heads: int, groups: int, dim: int, value_dim: int, sinks: int, samples: int) -> "Memory":
        shape, width = (like.shape[0], heads), dim + value_dim
        return Memory(
            sink=like.new_zeros(*shape, sinks, width),
            near=like.new_zeros(*shape, 0, width),
            slots=like.new_zeros(*shape, 0, width),
            bias=like.new_zeros(*shape, 0),
            moments=like.new_zeros(*shape, dim + 1, dim + 1),
            queries=like.new_zeros(*shape, groups, samples, dim + 1),
        )


@dataclass
class NearFarState(State):
    """The memory of a near/far call. Slots of all kv heads lie one after the other, since heads may have different numbers.

    Attributes:
        sink, near, moments, queries: as in `Memory`, for all kv heads.
        slots, bias: (..., all slots, E) and (..., all slots).
        tokens: (...,), visible keys seen, which is the position of the next one.
        merged: (...,), keys before this position, sinks aside, are in slots.
        kept, bounds, place, share: as in `Kept`, for the kv heads with recall alone; None if there are none.
    """

    sink: Tensor
    near: Tensor
    slots: Tensor
    bias: Tensor
    moments: Tensor
    queries: Tensor
    tokens: Tensor
    merged: Tensor
    kept: Tensor | None = None
    bounds: Tensor | None = None
    place: Tensor | None = None
    share: Tensor | None = None
    steps: Any = field(default=None, init=False, repr=False, compare=False)  # native.py: what `near` is a part of

    form: ClassVar[str] = "nearfar"
    batch_dims: ClassVar[dict[str, int]] = {
        "sink": 3,
        "near": 3,
        "slots": 2,
        "bias": 1,
        "moments": 3,
        "queries": 4,
        "tokens": 0,
        "merged": 0,
        "kept": 3,
        "bounds": 3,
        "place": 2,
        "share": 2,
    }

    def drop_last(self, tokens: int) -> "NearFarState":
        """Without its last tokens, which must still be in the window.

        Inside the current block it is as if they had never been. Farther back the keys that were merged meanwhile stay
        merged: nothing later than the new end is ever seen, but the window is shorter until it has filled up again.
        """
        if tokens < 0:
            raise ValueError(f"drop_last takes a number >= 0, got {tokens}.")
        new = self.tokens - tokens
        if bool((new < self.merged).any()):
            spare = int((self.tokens - self.merged).min())
            raise ValueError(f"cannot drop {tokens} tokens: only the last {spare} are still outside the slots.")
        keep = max(0, self.near.shape[-2] - tokens)
        return replace(self, near=self.near[..., :keep, :], tokens=new)

    def split(
        self, budgets: tuple[int, ...], groups: list[tuple[int, list[int]]], recall: tuple[int, ...] = (), unit: int = 1
    ) -> list[Memory]:
        """The memories of groups of kv heads that are treated alike; needs one batch dimension.

        recall: blocks that each kv head recalls, of `unit` tokens.
        """
        shared = (self.sink, self.near, self.moments, self.queries)
        if len(groups) == 1:
            B, H = self.near.shape[:2]
            sink, near, moments, queries = shared
            slots, bias = self.slots.reshape(B, H, -1, self.slots.shape[-1]), self.bias.reshape(B, H, -1)
            return [Memory(sink, near, slots, bias, moments, queries, self._kept_of(groups[0][1], recall, unit))]
        sizes = slots_of(budgets, self.slots.shape[-2])
        slots, bias = self.slots.split(list(sizes), 1), self.bias.split(list(sizes), 1)
        parts = []
        for _, heads in groups:
            sink, near, moments, queries = (x[:, heads] for x in shared)
            stacked = torch.stack([slots[h] for h in heads], 1), torch.stack([bias[h] for h in heads], 1)
            parts.append(Memory(sink, near, *stacked, moments, queries, self._kept_of(heads, recall, unit)))
        return parts

    def _kept_of(self, heads: list[int], recall: tuple[int, ...], unit: int) -> Kept | None:
        recalling = [h for h, k in enumerate(recall) if k > 0]
        found = [x for x in (self.kept, self.bounds, self.place, self.share) if x is not None]
        if not found or not heads or heads[0] not in recalling:
            return None
        index: Any = [recalling.index(h) for h in heads]
        if index == list(range(index[0], index[0] + len(index))):  # views: these are as long as the sequence
            index = slice(index[0], index[0] + len(index))
        entries, bounds, place, share = (x[:, index] for x in found)
        return Kept(entries, bounds, place, share, recall[heads[0]], unit)

    @staticmethod
    def join(
        kernel: str, parts: list[Memory], groups: list[tuple[int, list[int]]], tokens: Tensor, merged: Tensor
    ) -> "NearFarState":
        """The inverse of `split`."""
        if len(parts) == 1:
            part = parts[0]
            slots, bias = part.slots.flatten(1, 2), part.bias.flatten(1, 2)
            kept = {} if part.kept is None else _kept([part.kept])
            return NearFarState(
                kernel, part.sink, part.near, slots, bias, part.moments, part.queries, tokens, merged, **kept
            )
        place = {h: (part, i) for part, (_, heads) in zip(parts, groups) for i, h in enumerate(heads)}
        ordered = [place[h] for h in range(len(place))]
        joined = {
            name: torch.stack([getattr(part, name)[:, i] for part, i in ordered], 1)
            for name in ("sink", "near", "moments", "queries")
        }
        slots = torch.cat([part.slots[:, i] for part, i in ordered], 1)
        bias = torch.cat([part.bias[:, i] for part, i in ordered], 1)
        kept = _kept([part.kept.head(i) for part, i in ordered if part.kept is not None])
        return NearFarState(kernel, slots=slots, bias=bias, tokens=tokens, merged=merged, **joined, **kept)


def _kept(found: list[Kept]) -> dict[str, Tensor]:
    """What heads with recall keep, as fields of a state."""
    names = {"kept": "entries", "bounds": "bounds", "place": "place", "share": "share"}
    parts = {name: [getattr(kept, of) for kept in found] for name, of in names.items()} if found else {}
    return {name: xs[0] if len(xs) == 1 else torch.cat(xs, 1) for name, xs in parts.items()}


@lru_cache(maxsize=1024)
def slots_of(budgets: tuple[int, ...], total: int) -> tuple[int, ...]:
    """How many slots each head has: all grow alike, up to their budgets, and `total` together."""
    low, high = 0, max(budgets, default=0)
    while low < high:
        middle = (low + high) // 2
        if sum(min(m, middle) for m in budgets) < total:
            low = middle + 1
        else:
            high = middle
    return tuple(min(m, low) for m in budgets)
