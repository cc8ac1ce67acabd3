"""The processes that share a sequence."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"
SEQUENCE_NAMES = ("sequence", "seq", "sp", "cp", "context")  # of a mesh's dimension


@dataclass(frozen=True)
class Members:
    """A process group, this process's place in it, and the global ranks of all its processes in order.

    call: what these messages are about. It must be the same on all processes; `digest` of it is part of every message.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    call: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    @cached_property
    def digest(self) -> bytes:
        """Seven bytes."""
        return hashlib.blake2b(self.call.encode(), digest_size=7).digest()

    def about(self, function: str, **options: object) -> "Members":
        """The same processes, for messages of one call with these options. Of a tensor of floats, only its dtype counts."""
        words = [f"{name}={_word(value)}" for name, value in options.items()]
        return replace(self, call=f"{function}({', '.join(words)})")


def _word(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return str(value.dtype).removeprefix("torch.") if value.is_floating_point() else str(value.tolist())


_entered: ContextVar[Members | None] = ContextVar("linattn_members", default=None)


@contextmanager
def entered(who: Members) -> Iterator[None]:
    """Makes a group the default of this context."""
    token = _entered.set(who)
    try:
        yield
    finally:
        _entered.reset(token)


def members(group: GroupLike = None) -> Members:
    """The members of a process group, of a 1-D DeviceMesh, or of a mesh's dimension "sequence".

    None: those of the surrounding sequence_parallel, otherwise all processes. The order of the ranks is that of the shards.
    """
    if group is None and (who := _entered.get()) is not None:
        return who
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "sequence parallelism needs torch.distributed: start the program with torchrun and call "
            'torch.distributed.init_process_group("gloo") first.'
        )
    if isinstance(group, DeviceMesh):
        found: object = _of_mesh(group)
    else:
        found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(f"group must be a process group or a DeviceMesh of this process, got {type(group).__name__}.")
    rank = dist.get_rank(found)
    if rank < 0:
        raise ValueError("this process is not in the group: only its members may call.")
    return Members(found, rank, tuple(dist.get_process_group_ranks(found)))


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    named = [name for name in names if name in SEQUENCE_NAMES]
    if len(named) != 1:
        raise ValueError(
            f'a mesh of {mesh.ndim} dimensions {names} must have one that is called "sequence": pass it alone, e.g. '
            'mesh["sequence"].'
        )
    return mesh.get_group(named[0])
