"""Tensors of any strides for the library, and when it can read them: what the scan and the convolution share."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import output_pool
from .ffi import OTHER_VERSION, library

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Strided(Structure):
    """Mirrors struct Strided of csrc/scan/abi.h."""

    _fields_: ClassVar[list[Any]] = [("at", c_void_p), ("stride", c_int64 * 4), ("dtype", c_int64)]


def strided(x: Tensor | None) -> Strided:
    """A tensor's address, strides and dtype; all 0 for None."""
    if x is None:
        return Strided()
    return Strided(x.data_ptr(), x.stride(), DTYPES[x.dtype])


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def load_entries(structure: type[Structure], size_of: str, names: list[str]) -> dict[str, Callable[..., int]]:
    """The library's entry points that take such a structure; a ValueError where the library is of another version."""
    if library.why_not is not None:
        raise ValueError(library.why_not)
    loaded = library._library
    size = getattr(loaded, f"linattn_{size_of}_size", None)
    if size is None:
        raise ValueError(OTHER_VERSION)
    size.restype = c_int64
    if size() != ctypes.sizeof(structure):
        raise ValueError(OTHER_VERSION)
    entries = {}
    for name in names:
        entry = getattr(loaded, f"linattn_{name}")
        entry.argtypes, entry.restype = [POINTER(structure)], c_int32
        entries[name] = entry
    return entries


class LayerPast(NamedTuple):
    """What a layer keeps of the tokens before a call. history (B, width - 1, channels): the last inputs of its convolution;
    state (B, H, D, M). float32 and contiguous."""

    history: Tensor
    state: Tensor


@functools.cache
def load_layer(call: type[Structure], layer: type[Structure], name: str) -> Callable[..., int]:
    """The library's linattn_<name>: a rule, and what a layer does around it."""
    load_entries(layer, name, [])  # the versions agree
    entry: Any = getattr(library._library, f"linattn_{name}")
    entry.argtypes, entry.restype = [POINTER(call), POINTER(layer)], c_int32
    return entry


def heads_first(x: Tensor) -> tuple[int, int, int]:
    """Strides over batch, head and token of a (B, T, H, ..) tensor."""
    return x.stride(0), x.stride(2), x.stride(1)


def readable(x: Tensor) -> Tensor:
    """x, in float32 if it is of a dtype that the library does not read."""
    return x if x.dtype in DTYPES else x.float()


def empty_like(x: Tensor) -> Tensor:
    """A tensor of x's shape (b, c, t) and dtype, dense, whose channels are contiguous if those of x are."""
    b, c, t = x.shape
    shape = (b, t, c) if x.stride(1) == 1 else (b, c, t)
    if x.dtype == torch.float32 and type(x) in (Tensor, Parameter):
        made = output_pool.empty(*shape)
    else:
        made = x.new_empty(shape)
    return made.transpose(1, 2) if x.stride(1) == 1 else made


def fake_like(x: Tensor) -> Tensor:
    """What empty_like returns, for fake tensors."""
    b, c, t = x.shape
    return x.new_empty(b, t, c).transpose(1, 2) if x.stride(1) == 1 else x.new_empty(b, c, t)


def no_second_derivative(*_: Any) -> Any:
    raise RuntimeError('the native engine has no second derivatives: pass engine="torch" to differentiate twice.')
