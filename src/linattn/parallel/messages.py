"""Messages between processes: several tensors in one buffer of bytes, counted, with errors that say what happened.

Every process of an exchange passes tensors of the same names, shapes and dtypes. A message starts with a flag: whether its
sender will run a backward pass through it; and with a digest of the sender's call, which must be that of the receiver.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Members

Tensors = dict[str, Tensor]
_ALIGN = 8


@dataclass
class Traffic:
    """Bytes that this process received from others, by the kind of exchange, and how many exchanges there were."""

    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def add(self, kind: str, count: int) -> None:
        self.bytes[kind] = self.bytes.get(kind, 0) + count
        self.calls[kind] = self.calls.get(kind, 0) + 1


_counters: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts what this process receives inside the context.

    >>> with linattn.parallel.count_traffic() as traffic:     # doctest: +SKIP
    ...     linattn.parallel.attention(q, k, v, kernel="elu", is_causal=True)
    >>> traffic.total                                         # doctest: +SKIP
    """
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


def count(kind: str, received: int) -> None:
    for counter in _counters:
        counter.add(kind, received)


def failed(who: Members, error: Exception) -> RuntimeError:
    """The error of an exchange that did not come to an end."""
    return RuntimeError(
        f"process {who.rank} of {who.size} lost the others of its sequence-parallel group (global ranks {list(who.ranks)}): "
        "one of them has ended, raised an error or did not answer within the timeout of init_process_group. Look at its "
        "output first; start all of them again from the last checkpoint (torchrun --max-restarts does). "
        f"The backend says: {error}"
    )


def wait(work: Any, who: Members) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise failed(who, error) from error


def pack(tensors: Tensors, flag: bool, who: Members) -> Tensor:
    """One buffer of uint8: the flag and the call's digest, then each tensor at a multiple of 8 bytes."""
    device = next(iter(tensors.values())).device
    parts = [torch.tensor([int(flag), *who.digest], dtype=torch.uint8, device=device)]
    for x in tensors.values():
        raw = x.detach().contiguous().view(-1).view(torch.uint8)
        parts += [raw, raw.new_zeros(-raw.numel() % _ALIGN)]
    return torch.cat(parts)


def unpack(buffer: Tensor, like: Tensors, who: Members) -> tuple[Tensors, bool]:
    """The tensors of a buffer, of the names, shapes and dtypes of others, and its flag."""
    flag, *digest = buffer[:_ALIGN].tolist()
    if bytes(digest) != who.digest:
        raise RuntimeError(
            f"the processes of a sequence-parallel group (global ranks {list(who.ranks)}) did not make the same call: process "
            f"{who.rank} of {who.size} called {who.call}, and another one something else. All of them pass the same kernel, "
            "dtype and options, the same bounds of packed sequences, and a state and a decay or none."
        )
    found, at = {}, _ALIGN
    for name, x in like.items():
        size = x.numel() * x.element_size()
        found[name] = buffer[at : at + size].view(x.dtype).view(x.shape)
        at += size + -size % _ALIGN
    return found, bool(flag)


class Gathering:
    """An all-gather under way: started at once, finished by `wait`."""

    def __init__(self, tensors: Tensors, who: Members, *, flag: bool, kind: str):
        self.who, self.like = who, tensors
        own = pack(tensors, flag, who)
        self.buffers = [torch.empty_like(own) for _ in range(who.size)]
        count(kind, own.numel() * (who.size - 1))
        try:
            self.work = dist.all_gather(self.buffers, own, group=who.group, async_op=True)
        except RuntimeError as error:
            raise failed(who, error) from error

    def wait(self) -> tuple[list[Tensors], bool]:
        """The tensors of every process, and whether any of them set its flag."""
        wait(self.work, self.who)
        found = [unpack(buffer, self.like, self.who) for buffer in self.buffers]
        return [tensors for tensors, _ in found], any(flag for _, flag in found)


def gather(tensors: Tensors, who: Members, *, flag: bool = False, kind: str = "sizes") -> tuple[list[Tensors], bool]:
    return Gathering(tensors, who, flag=flag, kind=kind).wait()


MOST_PENDING = 64
_pending: deque[tuple[Any, Tensor]] = deque()  # sends under way and their buffers, the oldest first


def send(tensors: Tensors, to: int, who: Members, *, flag: bool = False) -> None:
    """Starts to send to a member; returns at once, unless many messages were not received yet.

    gloo does not say that a message has arrived before one waits for it.
    """
    while len(_pending) >= MOST_PENDING:
        wait(_pending.popleft()[0], who)
    buffer = pack(tensors, flag, who)
    try:
        _pending.append((dist.isend(buffer, who.ranks[to], group=who.group), buffer))
    except RuntimeError as error:
        raise failed(who, error) from error


def receive(like: Tensors, source: int, who: Members, *, kind: str) -> tuple[Tensors, bool]:
    """What a member sends, of the shapes of `like`, and its flag."""
    sizes = [x.numel() * x.element_size() for x in like.values()]
    device = next(iter(like.values())).device
    buffer = torch.empty(_ALIGN + sum(n + -n % _ALIGN for n in sizes), dtype=torch.uint8, device=device)
    count(kind, buffer.numel())
    try:
        work = dist.irecv(buffer, who.ranks[source], group=who.group)
    except RuntimeError as error:
        raise failed(who, error) from error
    wait(work, who)
    return unpack(buffer, like, who)


def exchange_parts(parts: Sequence[Tensor], sizes: Sequence[int], who: Members, *, kind: str) -> list[Tensor]:
    """Sends the flat tensor parts[j] to member j; returns flat tensors of sizes[j], one from each."""
    given = torch.cat([x.reshape(-1) for x in parts])
    out = given.new_empty(sum(sizes))
    count(kind, (sum(sizes) - sizes[who.rank]) * out.element_size())
    try:
        dist.all_to_all_single(out, given, list(sizes), [x.numel() for x in parts], group=who.group)
    except RuntimeError as error:
        raise failed(who, error) from error
    return list(out.split(list(sizes)))
