"""One training per folder: a lock that its process holds until it ends, however it ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

LOCK = "training.lock"
MESSAGE = 4096  # bytes of an error told to the other processes


class FolderInUse(ValueError):
    """Another process, or another thread of this one, is training into the folder."""


@contextmanager
def training_lock(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a folder, which is created if missing, for one training. Raises FolderInUse if it is held already.

    The thread that holds it may take it again, so a command can hold the folder for longer than its trainer does.
    Under torch.distributed the first process takes it for all of them, and all of them raise if it cannot. The operating
    system releases it when the process ends, so a killed run leaves nothing to clean up but an empty file.
    """
    top = Path(folder).resolve()
    shared = dist.is_initialized() and dist.get_world_size() > 1
    lock, error = None, None  # type: FileLock | None, Exception | None
    if not shared or dist.get_rank() == 0:
        try:
            lock = _acquire(top)
        except (FolderInUse, OSError) as failure:
            error = failure
    if shared:
        error = _first_of_all(error)
    if error is not None:
        raise error
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _first_of_all(error: Exception | None) -> Exception | None:
    """The first process's error, in every process; as text in a tensor, since gloo's threads must hold no Python object."""
    text = torch.zeros(1 + MESSAGE, dtype=torch.uint8)
    if error is not None:
        kind = 1 if isinstance(error, FolderInUse) else 2
        message = str(error).encode()[:MESSAGE]
        text[0] = kind
        text[1 : 1 + len(message)] = torch.tensor(list(message), dtype=torch.uint8)
    dist.broadcast(text, src=0)
    if not text[0]:
        return None
    message = bytes(text[1:].tolist()).rstrip(b"\0")
    return (FolderInUse if text[0] == 1 else OSError)(message.decode(errors="replace"))


def _acquire(folder: Path) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, is_singleton=True)  # a singleton counts, so its thread may acquire it again
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderInUse(
            f"another process is training in {folder}: wait until it has ended, or train into another folder."
        ) from None
    return lock
