"""Reads and writes the safetensors format with torch and numpy alone, so that the core needs nothing more.

A file is 8 bytes of header length, a JSON header of names, types, shapes and offsets, then the raw little-endian data.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._files import write_file

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def save(path: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes beside the target and renames, so that a file of that name is always whole."""
    header: dict[str, Any] = {"__metadata__": metadata}
    chunks, offset = [], 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        end = offset + len(data)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        chunks.append(data)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for data in chunks:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())

    write_file(path, write)


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    with open(path, "rb") as file:
        data = file.read()
    name = os.fspath(path)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError(f"{name} is not a safetensors file, or was cut short.")
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        body = memoryview(bytearray(data[8 + length :]))
        tensors = {key: _tensor(body, **entry) for key, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is not a whole safetensors file: {error}") from error
    return tensors, metadata


def _tensor(body: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    start, end = data_offsets
    kind = _TYPES[dtype]
    count = 1
    for size in shape:
        count *= size
    if not 0 <= start <= end <= len(body) or (end - start) != count * kind.itemsize:
        raise ValueError(f"{end - start} bytes at {start} of {len(body)} do not hold a {dtype} tensor of shape {shape}")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(body[start:end], dtype=kind).clone().reshape(shape)
