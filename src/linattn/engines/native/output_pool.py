"""Memory of large outputs: what was freed is kept for the next call, because the system would clear fresh pages first."""

import ctypes
import functools
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_int64, c_void_p, py_object

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from .ffi import library

LARGE = 2**19  # numbers: 2 MiB, one large page
# What is made from these does not depend on torch's defaults.
FLOATS = torch.empty(0, dtype=torch.float32, device="cpu")
COUNTS = torch.empty(0, dtype=torch.int64, device="cpu")
UNUSED = b"dltensor"  # the name of a capsule whose tensor was not taken yet

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = [c_void_p, c_char_p, c_void_p], py_object
_is_named = ctypes.pythonapi.PyCapsule_IsValid
_is_named.argtypes, _is_named.restype = [py_object, c_char_p], c_int


_places: list[tuple[int, Tensor]] = []  # by thread


@contextmanager
def placed(place: Tensor) -> Iterator[None]:
    """The next large float32 tensor of this shape that this thread makes is `place`, a contiguous part of a larger one.

    For the output of a call, which is then already where it belongs. Anything else may be written there as well meanwhile.
    """
    entry = threading.get_ident(), place
    _places.append(entry)
    try:
        yield
    finally:
        if any(x is entry for x in _places):
            _places[:] = [x for x in _places if x is not entry]


def _taken(shape: tuple[int, ...]) -> Tensor | None:
    own = threading.get_ident()
    for i, (thread, place) in enumerate(_places):
        if thread == own and place.shape == shape:
            del _places[i]
            return place
    return None


def empty(*shape: int) -> Tensor:
    """A float32 tensor of at most 4 dims with nothing in it yet."""
    if _places and (place := _taken(shape)) is not None:
        return place
    sizes = _sizes(shape)
    if sizes is not None:
        at = library.pool_alloc(len(shape), sizes)
        if at:
            return _tensor(at)
    return FLOATS.new_empty(*shape)  # faster than with a tuple


def empty_rows(shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """Output rows (B, H, T, M) with nothing in them yet, in the dtype of `like` (B, H, T, .); as there, tokens may lie before
    heads in memory."""
    B, H, T, M = shape
    tokens_first = like.stride(1) < like.stride(2)
    shape = (B, T, H, M) if tokens_first else shape
    # Fake and other special tensors, which torch.compile makes, have no memory of their own.
    plain = like.dtype is torch.float32 and type(like) in (Tensor, Parameter)
    made = empty(*shape) if plain else like.new_empty(shape)
    return made.transpose(1, 2) if tokens_first else made


@functools.lru_cache(512)
def _sizes(shape: tuple[int, ...]) -> ctypes.Array[c_int64] | None:
    """As the library wants them; None for a small tensor."""
    return (c_int64 * len(shape))(*shape) if math.prod(shape) >= LARGE else None


def kept() -> int:
    """Bytes of freed outputs that wait for the next call. The system may take all but the newest when it wants memory."""
    return 0 if library.why_not else library.pool_trim(sys.maxsize)


def release() -> int:
    """Hands the memory of freed outputs, which the native engine keeps for its next calls, to the system; how many bytes.

    >>> import linattn
    >>> freed = linattn.engines.release()
    >>> linattn.engines.release()
    0
    """
    before = kept()
    return before - library.pool_trim(0) if before else 0


def _tensor(at: int) -> Tensor:
    """torch's view of a DLManagedTensor, which frees it in the end."""
    capsule = None
    try:
        capsule = _capsule(at, UNUSED, None)
        return from_dlpack(capsule)
    except BaseException:
        if capsule is None or _is_named(capsule, UNUSED):
            library.pool_free(at)
        raise
