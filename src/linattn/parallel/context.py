"""sequence_parallel: a context in which the functions and modules of linattn act on shards of a sequence."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..functional import routing
from .attention import attention
from .causal_conv1d import causal_conv1d
from .delta_rule import decayed_sums, delta_rule
from .groups import GroupLike, Members, entered, members
from .messages import gather
from .schedules import Schedule
from .selective_scan import selective_scan
from .sequences import mean_loss, next_labels
from .shards import shard_lengths

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "causal_conv1d": causal_conv1d,
    "decayed_sums": decayed_sums,
    "delta_rule": delta_rule,
    "selective_scan": selective_scan,
}


class ShardRouter:
    """Sends calls of the public functions to their forms over shards."""

    def __init__(self, who: Members, schedule: Schedule):
        self.who, self.schedule = who, schedule

    def function(self, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            raise NotImplementedError(f"linattn.{name} has no form over shards: call it outside of sequence_parallel.")
        options = {} if name == "causal_conv1d" else {"schedule": self.schedule}
        return functools.partial(FUNCTIONS[name], group=self.who.group, **options)

    def tokens_before(self, counts: Tensor) -> Tensor:
        found, _ = gather({"counts": counts}, self.who)
        before = torch.zeros_like(counts)
        return sum((x["counts"] for x in found[: self.who.rank]), before)

    def start_of(self, tokens: int) -> tuple[int, bool]:
        lengths = shard_lengths(tokens, self.who, torch.device("cpu"))
        return sum(lengths[: self.who.rank]), 0 in lengths

    def next_labels(self, labels: Tensor, ignore_index: int) -> Tensor:
        return next_labels(labels, ignore_index=ignore_index, group=self.who.group)

    def mean_loss(self, total: Tensor, count: Tensor) -> Tensor:
        return mean_loss(total, count, group=self.who.group)


@contextmanager
def sequence_parallel(group: GroupLike = None, *, schedule: Schedule = "auto") -> Iterator[Members]:
    """A context in which linattn acts on shards: every process of the group holds a contiguous part of each sequence.

    linattn.attention, linattn.delta_rule, linattn.selective_scan, linattn.causal_conv1d, the modules of linattn.nn and
    transformers models with linattn attached then compute the rows that one process would. Run the backward pass inside as
    well if parts of the model are computed again there (activation checkpointing).

        with linattn.parallel.sequence_parallel(mesh["sequence"]):
            loss = model(linattn.parallel.shard(tokens))
            loss.backward()

    Args:
        group: a process group, a 1-D DeviceMesh, or a mesh with a dimension called "sequence"; None: all processes.
        schedule: as in linattn.parallel.attention.
    """
    who = members(group)
    router = ShardRouter(who, schedule) if who.size > 1 else None
    with entered(who), routing.routed(router):
        yield who
