"""The shared library: where it is, what it runs on, and the structures a call is handed over in."""

import ctypes
import glob
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import torch

ISA_LEVELS = ("portable", "avx2", "avx512")
NOT_FINITE, NO_MEMORY = 1, 2
MOST_GROUPS = 64  # query heads that share a kv head: csrc/backward.h
INTERFACE = 5  # of csrc/call.h
OTHER_VERSION = "its library is of another version of linattn: install linattn again"


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Call(Structure):
    """Mirrors struct Call of csrc/call.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch heads kv_heads queries keys dim value_dim features threads segment", c_int64),
        *_fields("map dtype scaled pad", c_int32),
        *_fields("square constant", c_double),
        ("root", c_float),
        *_fields("low high", c_float * 2),
        ("pad2", c_float),
        *_fields("weight weight_t bias query key value", c_void_p),
        *_fields("query_stride key_stride value_stride", c_int64 * 3),
        *_fields("mask log_decay log_weight S Z scale tokens guarded", c_void_p),
        *_fields("S_new Z_new scale_new tokens_new guarded_new out marks", c_void_p),
        *_fields("grad_out grad_S_new grad_Z_new grad_query grad_key grad_value grad_S grad_Z grad_log", c_void_p),
    ]


class NearFarCall(Structure):
    """Mirrors struct NearFarCall of csrc/nearfar_call.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch heads kv_heads tokens dim value_dim window sinks block stride threads", c_int64),
        *_fields("held held_new slots slots_new", c_int64),
        ("dtype", c_int32),
        *_fields("root alpha", c_float),
        ("pad", c_int32),
        ("steps", c_int64),
        *_fields("query key value", c_void_p),
        *_fields("query_stride key_stride value_stride", c_int64 * 3),
        *_fields("mask seen counts merged budgets first_slot first_slot_new sink near", c_void_p),
        ("near_stride", c_int64 * 2),
        *_fields("slot bias moments queries sink_new near_new", c_void_p),
        ("near_new_stride", c_int64 * 2),
        *_fields("slot_new bias_new moments_new queries_new out", c_void_p),
    ]


class MergeCall(Structure):
    """Mirrors struct MergeCall of csrc/nearfar_call.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("problems slots size dim value_dim threads", c_int64),
        ("alpha", c_float),
        ("pad", c_int32),
        *_fields("slot bias anchor metric slot_new bias_new place", c_void_p),
    ]


ENTRIES = {
    Call: ("call", ["absorb", "read", "causal", "absorb_backward", "read_backward", "causal_backward"]),
    NearFarCall: ("nearfar_call", ["nearfar_walk"]),
    MergeCall: ("merge_call", ["merge_slots"]),
}


def _memory_limit() -> int:
    """Bytes of freed outputs that may be kept: LINATTN_KEEP_MB (MiB), or an eighth of the machine's memory."""
    if sys.platform != "linux":
        return 0
    wanted = os.environ.get("LINATTN_KEEP_MB")
    if not wanted:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    if not wanted.isdecimal():
        raise ValueError(f"LINATTN_KEEP_MB is {wanted!r}; it must be a whole number, 0 to keep nothing")
    return min(int(wanted) * 2**20, sys.maxsize)


class Library:
    """The loaded library, or `why_not`: the sentence that says what is missing."""

    absorb: Callable[..., int]
    read: Callable[..., int]
    causal: Callable[..., int]
    absorb_backward: Callable[..., int]
    read_backward: Callable[..., int]
    causal_backward: Callable[..., int]
    nearfar_walk: Callable[..., int]
    merge_slots: Callable[..., int]
    step: Any
    nearfar_step: Any
    whole: Any
    memory_take: Any
    memory_give: Any
    memory_trim: Any

    def __init__(self) -> None:
        self.why_not: str | None = None
        self.threads = "one"
        self.memory_limit = 0
        try:
            self._load()
        except (OSError, AttributeError, ValueError) as error:
            self.why_not = str(error)

    def _load(self) -> None:
        found = sorted(glob.glob(os.path.join(os.path.dirname(__file__), "_linattn*.lib.so")))
        if not found:
            raise OSError("its library was not built when linattn was installed (a C++17 compiler is needed)")
        library = ctypes.CDLL(found[0])
        library.linattn_isa.restype = c_char_p
        version = getattr(library, "linattn_interface", None)
        if version is None or version() != INTERFACE:
            raise ValueError(OTHER_VERSION)
        for structure, (size_of, names) in ENTRIES.items():
            size = getattr(library, f"linattn_{size_of}_size")
            size.restype = c_int64
            if size() != ctypes.sizeof(structure):
                raise ValueError(OTHER_VERSION)
            for name in names:
                entry = getattr(library, f"linattn_{name}")
                entry.argtypes, entry.restype = [POINTER(structure)], c_int32
                setattr(self, name, entry)
        self.step = library.linattn_step
        self.step.argtypes, self.step.restype = [c_void_p] * 8, c_int32
        self.nearfar_step = library.linattn_nearfar_step
        at, number = c_void_p, c_int64
        self.nearfar_step.argtypes = [at, number, at, at, at, at, number, at, at, at, at]
        self.nearfar_step.restype = c_int32
        self.whole = library.linattn_whole
        self.whole.argtypes, self.whole.restype = [at, at, at, at, at, number, c_int32], c_int32
        self.memory_take, self.memory_give = library.linattn_memory_take, library.linattn_memory_give
        self.memory_take.argtypes, self.memory_take.restype = [c_int32, POINTER(c_int64)], c_void_p
        self.memory_give.argtypes, self.memory_give.restype = [c_void_p], None
        self.memory_trim = library.linattn_memory_trim
        self.memory_trim.argtypes, self.memory_trim.restype = [c_int64], c_int64
        library.linattn_memory_limit.argtypes, library.linattn_memory_limit.restype = [c_int64], None
        self.memory_limit = _memory_limit()
        library.linattn_memory_limit(self.memory_limit)
        self._library = library
        self._use_torch_threads()
        wanted = os.environ.get("LINATTN_ISA")
        if wanted:
            self.set_isa(wanted)

    def _use_torch_threads(self) -> None:
        """Hands over torch's own parallel loop, so that torch.set_num_threads holds and pools do not fight."""
        path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        try:
            loop = ctypes.CDLL(path).torch_parallel_for
        except (OSError, AttributeError):
            return
        self._library.linattn_use_threads(loop)
        self.threads = "torch's"

    @property
    def isa(self) -> str:
        return self._library.linattn_isa().decode()

    def set_isa(self, name: str) -> None:
        """Chooses an instruction set for every call from now on; for tests, and by LINATTN_ISA for everybody."""
        if name not in ISA_LEVELS:
            raise ValueError(f"LINATTN_ISA is {name!r}; it must be one of {', '.join(ISA_LEVELS)}")
        if not self._library.linattn_set_isa(ISA_LEVELS.index(name)):
            raise ValueError(f"LINATTN_ISA asks for {name}, which this CPU does not have")


library = Library()
