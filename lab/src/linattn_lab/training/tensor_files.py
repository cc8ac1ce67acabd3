"""safetensors files with metadata, written whole or not at all."""

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linattn._files import write_file

VERSION = "1"


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, whole or not at all."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    whole = {name: x.detach().contiguous().clone() for name, x in tensors.items()}
    write_file(path, lambda temporary: save_file(whole, temporary, metadata=metadata))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `write_tensors` wrote."""
    try:
        with safe_open(os.fspath(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != VERSION:
                raise ValueError(
                    f"{os.fspath(path)} was not written by this trainer (version {metadata.get('version')})."
                )
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is damaged: {error}.") from error
