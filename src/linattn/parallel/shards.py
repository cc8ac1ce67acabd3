"""Which part of which packed sequence a process holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .groups import Members
from .messages import gather


def shard_lengths(tokens: int, who: Members, device: torch.device) -> list[int]:
    """How many tokens each process holds."""
    found, _ = gather({"tokens": torch.tensor([tokens], device=device)}, who)
    return [int(x["tokens"]) for x in found]


@dataclass(frozen=True)
class Shard:
    """The sequences of one process: numbers of those it holds tokens of, and their bounds within its tokens.

    continues: the first one began on an earlier process. goes_on: the last one ends on a later process.
    """

    sequences: tuple[int, ...]
    bounds: tuple[int, ...]
    continues: bool
    goes_on: bool

    @property
    def last_start(self) -> int:
        """The first of this process's tokens that belongs to its last sequence."""
        return self.bounds[-2] if self.sequences else 0

    @property
    def alone(self) -> bool:
        """All tokens belong to one sequence that began earlier: what came before reaches its end."""
        return self.continues and len(self.sequences) == 1


@dataclass(frozen=True)
class Packing:
    """Packed sequences over all processes: bounds of the whole, and the shard of every process."""

    bounds: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def owner(self, sequence: int) -> int:
        """The process that holds a sequence's last token; the first one for a sequence without tokens."""
        for rank, shard in enumerate(self.shards):
            if sequence in shard.sequences and not (shard.goes_on and shard.sequences[-1] == sequence):
                return rank
        return 0


def pack_shards(cu_seqlens: object, lengths: Sequence[int]) -> Packing:
    """Of bounds 0 = c_0 <= c_1 .. <= c_n of the sequences in all shards together."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    total = sum(lengths)
    if (
        not isinstance(bounds, (list, tuple))
        or not all(isinstance(b, int) for b in bounds)
        or len(bounds) < 2
        or bounds[0] != 0
        or bounds[-1] != total
        or list(bounds) != sorted(bounds)
    ):
        raise ValueError(
            "cu_seqlens must be one list of bounds of the whole sequence, the same on every process: it must rise from 0 to "
            f"the {total} tokens of all {len(lengths)} processes together; got {cu_seqlens!r}."
        )
    shards, start = [], 0
    for length in lengths:
        shards.append(_shard(bounds, start, start + length))
        start += length
    return Packing(tuple(bounds), tuple(shards))


def _shard(bounds: Sequence[int], start: int, stop: int) -> Shard:
    """Of the tokens [start, stop). A process without tokens inside a sequence passes that sequence's state on."""
    if start == stop:
        held = [i for i in range(len(bounds) - 1) if bounds[i] < start < bounds[i + 1]]
    else:
        held = [
            i
            for i in range(len(bounds) - 1)
            if bounds[i] < stop and bounds[i + 1] > start and bounds[i + 1] > bounds[i]
        ]
    if not held:
        return Shard((), (0,), False, False)
    local = [max(0, bounds[i] - start) for i in held] + [min(stop, bounds[held[-1] + 1]) - start]
    return Shard(tuple(held), tuple(local), bounds[held[0]] < start, bounds[held[-1] + 1] > stop)
