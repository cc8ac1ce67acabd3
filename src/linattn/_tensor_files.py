"""Tensors as safetensors files: written atomically, validated when read."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ._files import write_file


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes beside the target, syncs and renames, so that a file of that name is always complete."""
    data = save({name: x.detach().cpu().resolve_neg().contiguous() for name, x in tensors.items()}, metadata)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if temporary.is_file():  # pipes and devices cannot be synced
                os.fsync(file.fileno())

    write_file(path, write)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata. A file that cannot be opened is an OSError, a damaged one a ValueError."""
    name = os.fspath(path)
    with open(path, "rb"):  # raises the system's own errors
        pass
    try:
        with safe_open(name, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: _own(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} is not a whole safetensors file: {reason}") from error
    return tensors, metadata


def read_header(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata alone; errors as `read_tensors` has them."""
    name = os.fspath(path)
    with open(path, "rb"):
        pass
    try:
        with safe_open(name, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} is not a whole safetensors file: {reason}") from error


def _own(x: Tensor) -> Tensor:
    """A copy in its own memory: safetensors maps the file, which another process may truncate."""
    return x.view(torch.uint8) != 0 if x.dtype == torch.bool else x.clone()
