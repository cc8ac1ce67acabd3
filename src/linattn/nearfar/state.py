"""The state of near/far attention: exact near tokens, pooled far tokens, and statistics of the queries.

Shapes: B batch, H kv heads, G query heads per kv head, D dim, M value dim. Keys are scaled by sqrt(scale) and stored beside
their values, in one tensor of width E = D + M (an entry).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.base import compute_dtype
from ..states.base import State
from ..states.layout import Spec
from .biases import PLAIN, Scores
from .entry_codes import decode, encode, steps_of, stored_width, value_dim_of
from .far_cache import FarCache
from .kernel import NearFar
from .positions import Positions


def _no_tensor() -> None:
    return None


@dataclass(eq=False, repr=False)
class NearFarState(State):
    """The state of a near/far call. Heads may have different numbers of slots, so these lie one head after the other.

    Attributes:
        sink: (..., H, sinks, W), the first tokens of the sequence. W is E, or more in 8 bits. Like `near` and `slots` in the
            type of the kernel's `state_bits` (see entry_codes); everything else is in the type that calls compute in.
        near: (..., H, T, W), the last T tokens.
        slots: (..., slots of all heads, W), weighted means of the keys and values that were merged.
        bias: (..., slots of all heads), added to x.k of a slot; 0 for a single key, -inf for an empty slot.
        received: (..., slots of all heads, 2), the attention that a slot received, and from how many queries.
        near_received: (..., H, window, 2), the same of the tokens before the position `entered`.
        moments: (..., H, 2, D + 1), sums of [x, 1] and of its squares over the sampled queries of all finished blocks.
        queries: (..., H, G, block / stride, D + 1), [x, 1] of the sampled queries of the unfinished block.
        tokens: (...,), visible keys seen, which is the position of the next one.
        merged: (...,), the merge frontier: keys before this position are in slots, except for the sinks.
        entered: (...,), where the last block that was entered begins.
        far_entries, far_bounds, far_slot, far_log_share: as in FarCache, for the heads with recall; None without.
    """

    sink: Tensor
    near: Tensor
    slots: Tensor
    bias: Tensor
    received: Tensor
    near_received: Tensor
    moments: Tensor
    queries: Tensor
    tokens: Tensor
    merged: Tensor
    entered: Tensor
    far_entries: Tensor | None = field(default_factory=_no_tensor)
    far_bounds: Tensor | None = field(default_factory=_no_tensor)
    far_slot: Tensor | None = field(default_factory=_no_tensor)
    far_log_share: Tensor | None = field(default_factory=_no_tensor)

    form: ClassVar[str] = "nearfar"
    table: ClassVar[dict[str, Spec]] = {
        "sink": Spec(("H", "sinks", "W"), "entry"),
        "near": Spec(("H", "T", "W"), "entry"),
        "slots": Spec(("C", "W"), "entry"),
        "bias": Spec(("C",), "log"),
        "received": Spec(("C", "two"), "statistic"),
        "near_received": Spec(("H", "window", "two"), "statistic"),
        "moments": Spec(("H", "two", "D1"), "statistic"),
        "queries": Spec(("H", "G", "samples", "D1"), "statistic"),
        "tokens": Spec((), "count"),
        "merged": Spec((), "count"),
        "entered": Spec((), "count"),
        "far_entries": Spec(("R", "cells", "E"), "code", optional=True),
        "far_bounds": Spec(("R", "units", "width"), "code", optional=True),
        "far_slot": Spec(("R", "cells"), "count", optional=True),
        "far_log_share": Spec(("R", "cells"), "log", optional=True),
    }

    @staticmethod
    def empty(kernel: NearFar, signature: str, query: Tensor, key: Tensor, value: Tensor) -> "NearFarState":
        """Before the first token of a call with query (B, Hq, L, D), key (B, H, S, D) and value (B, H, S, M)."""
        B, heads, _, D = query.shape
        H, E, samples = key.shape[1], D + value.shape[-1], kernel.block // kernel.stride
        like = query.new_empty(B, dtype=compute_dtype(query.dtype))
        stored, W = kernel.entry_dtype(like.dtype), stored_width(kernel.state_bits, D, E - D)
        recalling = sum(blocks > 0 for blocks in kernel.recalls(H))
        far = _far_fields([FarCache.empty(like, recalling, D, E - D, kernel)] if recalling else [])
        none = torch.zeros(B, dtype=torch.int64, device=query.device)
        return NearFarState(
            signature,
            sink=like.new_zeros(B, H, kernel.sinks, W, dtype=stored),
            near=like.new_zeros(B, H, 0, W, dtype=stored),
            slots=like.new_zeros(B, 0, W, dtype=stored),
            bias=like.new_zeros(B, 0),
            received=like.new_zeros(B, 0, 2),
            near_received=like.new_zeros(B, H, kernel.window, 2),
            moments=like.new_zeros(B, H, 2, D + 1),
            queries=like.new_zeros(B, H, heads // max(1, H), samples, D + 1),
            tokens=none,
            merged=none,
            entered=none,
            **far,
        )

    @property
    def positions(self) -> Positions:
        """Of a state with one batch dimension."""
        return Positions(self.tokens.tolist(), self.merged.tolist(), self.entered.tolist())

    def drop_last(self, tokens: int) -> "NearFarState":
        """Without the last tokens, which must still be in the window.

        Inside the current block the result is as if they had never been added. Farther back, keys that were merged since
        then stay merged: nothing after the new end is visible, but the window is shorter until it has filled up again.
        """
        if tokens < 0:
            raise ValueError(f"drop_last takes a number >= 0, got {tokens}.")
        new = self.tokens - tokens
        if bool((new < self.merged).any()):
            spare = int((self.tokens - self.merged).min())
            raise ValueError(f"cannot drop {tokens} tokens: only the last {spare} are still outside the slots.")
        keep = max(0, self.near.shape[-2] - tokens)
        window = self.near_received.shape[-2]
        position = self.entered.unsqueeze(-1) - window + torch.arange(window, device=new.device)
        gone = (position >= new.unsqueeze(-1))[..., None, :, None]
        received = self.near_received.masked_fill(gone, 0)
        return replace(self, near=self.near[..., :keep, :], near_received=received, tokens=new)

    def _check_sizes(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        coded = [tensors[name].dtype == torch.int8 for name in ENTRIES]
        if any(coded) != all(coded):
            raise ValueError("its sink, near and slots must be int8, or none of them.")
        if sizes["two"] != 2:
            raise ValueError(f"received, near_received and moments are pairs of numbers, got {sizes['two']}.")
        dim, numbers = sizes["D1"] - 1, sizes["W"]
        if coded[0]:
            value_dim = value_dim_of(numbers, dim) if dim > 0 else None
            if value_dim is None:
                raise ValueError(f"its keys of dim {dim} and their values cannot be {numbers} bytes wide.")
            numbers = dim + value_dim
        if sizes.setdefault("E", numbers) != numbers:
            raise ValueError(f"its far tokens have {sizes['E']} numbers, its keys and values {numbers}.")
        if not 2 <= sizes["D1"] <= sizes["E"] + 1:
            raise ValueError(f"its moments are of dim {sizes['D1'] - 1}, its keys and values of {sizes['E']} numbers.")
        if "R" in sizes and not {"far_entries", "far_bounds", "far_slot", "far_log_share"} <= set(tensors):
            raise ValueError("far_entries, far_bounds, far_slot and far_log_share must be given together.")

    def _check_values(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        for name in ENTRIES:
            if tensors[name].dtype == torch.int8 and not bool(
                steps_of(tensors[name], sizes["D1"] - 1).isfinite().all()
            ):
                raise ValueError(f"its {name} must be finite, but holds NaN or infinity.")
        rows = zip(tensors["tokens"].flatten().tolist(), tensors["merged"].flatten().tolist(), strict=True)
        for tokens, merged in rows:
            if merged > tokens:
                raise ValueError(f"its slots hold the keys before {merged}, but it has seen {tokens}.")
            if tokens - merged > sizes["T"]:
                raise ValueError(
                    f"its {sizes['T']} near tokens are fewer than the {tokens - merged} outside its slots."
                )

    def _describe(self, sizes: dict[str, int]) -> list[str]:
        dim = sizes["D1"] - 1
        return [f"slots={sizes['C']}", f"dim={dim}", f"value_dim={sizes['E'] - dim}"]

    # Groups of heads ------------------------------------------------------------------------------------------------

    def head_groups(self, kernel: NearFar, positions: Positions | None = None) -> "list[HeadGroup]":
        """Views of the heads that have equal budgets and recall; needs one batch dimension.

        positions: of this state, where they are known already. A compiled graph cannot read them from tensors.
        """
        B, H = self.near.shape[:2]
        positions, kinds = positions or self.positions, kernel.groups(H)
        sizes = list(share_slots(kernel.budgets(H), self.slots.shape[-2]))
        parts = {} if len(kinds) == 1 else {name: getattr(self, name).split(sizes, 1) for name in _BY_SLOT}
        groups, scores = [], kernel.scores(self.queries.shape[2], self.bias)
        for budget, heads in kinds:
            if len(kinds) == 1:
                used = self.slots.shape[1] // max(1, H)
                fields = {name: x.reshape(B, H, used, *x.shape[2:]) for name, x in self._named(_BY_SLOT).items()}
                fields |= self._named(_BY_HEAD)
            else:
                fields = {name: torch.stack([part[h] for h in heads], 1) for name, part in parts.items()}
                fields |= {name: x[:, heads] for name, x in self._named(_BY_HEAD).items()}
            dim = self.moments.shape[-1] - 1
            fields |= {name: decode(fields[name], dim, self.bias.dtype) for name in ENTRIES}
            cache = self._far_cache(kernel, heads)
            own = scores if len(kinds) == 1 else scores.of_heads(heads)
            groups.append(HeadGroup(heads=heads, budget=budget, positions=positions, cache=cache, scores=own, **fields))
        return groups

    def _named(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in names}

    def _far_cache(self, kernel: NearFar, heads: list[int]) -> FarCache | None:
        """Of heads that recall alike."""
        blocks = kernel.recalls(self.near.shape[1])
        stored = [x for x in (self.far_entries, self.far_bounds, self.far_slot, self.far_log_share) if x is not None]
        if not stored or not heads or blocks[heads[0]] == 0:
            return None
        recalling = [h for h, count in enumerate(blocks) if count > 0]
        rows = [recalling.index(h) for h in heads]
        # Views where they will do: these tensors are as long as the sequence.
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        index = slice(rows[0], rows[0] + len(rows)) if contiguous else rows
        entries, bounds, slot, log_share = (x[:, index] for x in stored)
        shift = kernel.window % kernel.block
        return FarCache(entries, bounds, slot, log_share, blocks[heads[0]], kernel.recall_unit, shift, kernel.positions)

    @staticmethod
    def from_groups(kernel: NearFar, signature: str, groups: "Sequence[HeadGroup]") -> "NearFarState":
        """The inverse of `head_groups`."""
        first = groups[0]
        tokens, merged, entered = (
            torch.tensor(n, dtype=torch.int64, device=first.near.device) for n in first.positions
        )
        if len(groups) == 1:
            shared = {name: getattr(first, name) for name in _BY_HEAD}
            shared |= {name: getattr(first, name).flatten(1, 2) for name in _BY_SLOT}
            caches = [] if first.cache is None else [first.cache]
        else:
            owner = {h: (group, i) for group in groups for i, h in enumerate(group.heads)}
            ordered = [owner[h] for h in range(len(owner))]
            shared = {name: torch.stack([getattr(group, name)[:, i] for group, i in ordered], 1) for name in _BY_HEAD}
            shared |= {name: torch.cat([getattr(g, name)[:, i] for g, i in ordered], 1) for name in _BY_SLOT}
            caches = [group.cache.head(i) for group, i in ordered if group.cache is not None]
        dim = first.moments.shape[-1] - 1
        shared |= {name: encode(shared[name], dim, kernel.state_bits) for name in ENTRIES}
        return NearFarState(signature, tokens=tokens, merged=merged, entered=entered, **shared, **_far_fields(caches))


_BY_HEAD = ("sink", "near", "near_received", "moments", "queries")  # fields with one entry for each kv head
_BY_SLOT = ("slots", "bias", "received")  # fields with one entry for each slot
ENTRIES = ("sink", "near", "slots")  # fields in the type of the kernel's `state_bits`


@dataclass(frozen=True)
class HeadGroup:
    """A view of a NearFarState: the kv heads with equal budgets, whose slots fit into one tensor. B is one dimension.

    Attributes:
        heads: which kv heads these are.
        budget: the largest number of slots of each head.
        slots, bias, received: (B, H, c, E), (B, H, c) and (B, H, c, 2), c <= budget.
        cache: the far tokens of heads with recall.
        scores: how their logits are made.
        sink, near, near_received, moments, queries: as in NearFarState.
    """

    heads: list[int]
    budget: int
    positions: Positions
    slots: Tensor
    bias: Tensor
    received: Tensor
    sink: Tensor
    near: Tensor
    near_received: Tensor
    moments: Tensor
    queries: Tensor
    cache: FarCache | None = None
    scores: Scores = PLAIN


def _far_fields(caches: Sequence[FarCache]) -> dict[str, Tensor]:
    """The fields of a state for the far caches of its heads, in the order of the heads."""
    fields = {
        "far_entries": [cache.entries for cache in caches],
        "far_bounds": [cache.bounds for cache in caches],
        "far_slot": [cache.slot for cache in caches],
        "far_log_share": [cache.log_share for cache in caches],
    }
    return {name: xs[0] if len(xs) == 1 else torch.cat(xs, 1) for name, xs in fields.items() if xs}


def share_slots(budgets: tuple[int, ...], total: int) -> tuple[int, ...]:
    """How many slots each head has when all have `total` together: they grow alike, up to their budgets."""
    low, high = 0, max(budgets, default=0)
    while low < high:
        middle = (low + high) // 2
        if sum(min(m, middle) for m in budgets) < total:
            low = middle + 1
        else:
            high = middle
    return tuple(min(m, low) for m in budgets)


# For native calls. What torch.compile may trace calls `share_slots`: it warns of a cache.
slots_per_head = lru_cache(maxsize=1024)(share_slots)

torch.serialization.add_safe_globals([NearFarState])  # for torch.load(weights_only=True)
