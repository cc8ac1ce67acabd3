"""The shared library: where it is, what it runs on, and the structures a call is handed over in."""

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any, ClassVar

import torch

NOT_FINITE, NO_MEMORY, OVERFLOWED, STALE = 1, 2, 4, 8
MOST_GROUPS = 64  # query heads that share a kv head: csrc/linear/backward.h
ABI_VERSION = 22  # of csrc/core/abi.h
REASON_FILE = "_linattn.why_not.txt"  # written by CMakeLists.txt where the library could not be built
OTHER_VERSION = "its library is of another version of linattn: install linattn again"


def isa_levels(machine: str) -> tuple[str, ...]:
    """The instruction sets that a library for such a CPU may have, by their number in csrc/core/dispatch.cpp."""
    if machine.lower() in ("x86_64", "amd64"):
        return "portable", "avx2", "avx512"
    return ("portable", "neon") if machine.lower() in ("aarch64", "arm64") else ("portable",)


ISA_LEVELS = isa_levels(platform.machine())


def find_library(folder: str) -> str:
    """The path of the native library: $LINATTN_LIBRARY, or the one in `folder`, as CMake names it on this system."""
    chosen = os.environ.get("LINATTN_LIBRARY")
    if chosen:
        return chosen
    path = os.path.join(folder, "_linattn.lib.dylib" if sys.platform == "darwin" else "_linattn.lib.so")
    if os.path.exists(path):
        return path
    try:
        with open(os.path.join(folder, REASON_FILE), encoding="utf-8") as reason:
            raise OSError(reason.read().strip())
    except FileNotFoundError:
        raise OSError("its library was not built when linattn was installed") from None


def torch_library() -> str:
    """The path of the library that has torch's parallel loop."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    return os.path.join(os.path.dirname(torch.__file__), "lib", name)


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class LinearCall(Structure):
    """Mirrors struct LinearCall of csrc/linear/abi.h, which says what the fields mean."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch heads kv_heads queries keys dim value_dim features threads segment", c_int64),
        *_fields("feature_map dtype scaled reserved", c_int32),
        *_fields("norm_coef norm_const", c_double),
        ("input_scale", c_float),
        *_fields("quadratic_low quadratic_high", c_float * 2),
        ("reserved2", c_float),
        *_fields("projection projection_t projection_bias query key value", c_void_p),
        *_fields("query_stride key_stride value_stride", c_int64 * 3),
        *_fields("mask log_decay log_weight S Z log_scale tokens guarded", c_void_p),
        *_fields("S_new Z_new log_scale_new tokens_new guarded_new out checkpoints", c_void_p),
        *_fields("grad_out grad_S_new grad_Z_new grad_query grad_key grad_value", c_void_p),
        *_fields("grad_S grad_Z grad_log_weight", c_void_p),
    ]


class NearFarCall(Structure):
    """Mirrors struct NearFarCall of csrc/nearfar/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch heads kv_heads tokens dim value_dim window sinks block stride threads", c_int64),
        *_fields("near_tokens near_tokens_new slots slots_new", c_int64),
        ("dtype", c_int32),
        *_fields("sqrt_scale alpha logit_cap", c_float),
        *_fields("step reach entry_dtype", c_int64),
        ("band", c_void_p),
        *_fields("query key value", c_void_p),
        *_fields("query_stride key_stride value_stride", c_int64 * 3),
        *_fields("mask seen counts merged entered budgets first_slot first_slot_new sink near", c_void_p),
        ("near_stride", c_int64 * 2),
        *_fields("slot bias received near_received moments query_samples sink_new near_new", c_void_p),
        ("near_new_stride", c_int64 * 2),
        *_fields("slot_new bias_new received_new near_received_new moments_new query_samples_new out", c_void_p),
        *_fields("far merges", c_void_p),
        *_fields("merge_blocks merge_rows", c_int64),
    ]


class FarCacheCall(Structure):
    """Mirrors struct FarCacheCall of csrc/nearfar/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("heads unit bits shift capacity cells cells_new position", c_int64),
        ("position_unit", c_float),
        ("reserved", c_int32),
        *_fields("recall row entries bounds slot log_share slot_new log_share_new", c_void_p),
    ]


class NearFarGrads(Structure):
    """Mirrors struct NearFarGrads of csrc/nearfar/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        ("call", POINTER(NearFarCall)),
        *_fields("out sink_new near_new slot_new bias_new query key value sink near slot bias band", c_void_p),
    ]


class MergeCall(Structure):
    """Mirrors struct MergeCall of csrc/nearfar/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("problems slots size dim value_dim threads", c_int64),
        *_fields("alpha logit_cap", c_float),
        *_fields("slot bias rate anchor metric slot_new bias_new place", c_void_p),
    ]


class BidirectionalCall(Structure):
    """Mirrors struct BidirectionalCall of csrc/nearfar/abi.h."""

    _fields_: ClassVar[list[Any]] = [
        *_fields("batch heads kv_heads queries keys dim value_dim same_tokens window block threads", c_int64),
        ("dtype", c_int32),
        *_fields("sqrt_scale alpha logit_cap", c_float),
        *_fields("query key value", c_void_p),
        *_fields("query_stride key_stride value_stride", c_int64 * 3),
        *_fields("sizes mask out", c_void_p),
    ]


LINEAR_ENTRIES = (
    "update_state",
    "read_state",
    "causal_forward",
    "update_state_backward",
    "read_state_backward",
    "causal_backward",
)
ENTRIES = {
    LinearCall: ("linear_call", [f"linear_{name}" for name in LINEAR_ENTRIES]),
    NearFarCall: ("nearfar_call", ["nearfar_prefill"]),
    FarCacheCall: ("nearfar_far_cache_call", []),
    NearFarGrads: ("nearfar_grads", ["nearfar_backward"]),
    MergeCall: ("nearfar_merge_call", ["nearfar_merge"]),
    BidirectionalCall: ("nearfar_bidirectional_call", ["nearfar_bidirectional"]),
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

    linear_update_state: Callable[..., int]
    linear_read_state: Callable[..., int]
    linear_causal_forward: Callable[..., int]
    linear_update_state_backward: Callable[..., int]
    linear_read_state_backward: Callable[..., int]
    linear_causal_backward: Callable[..., int]
    nearfar_prefill: Callable[..., int]
    nearfar_backward: Callable[..., int]
    nearfar_merge: Callable[..., int]
    nearfar_bidirectional: Callable[..., int]
    linear_decode: Any
    nearfar_decode: Any
    linear_forward: Any
    checksum: Any
    pool_alloc: Any
    pool_free: Any
    pool_trim: Any

    def __init__(self) -> None:
        self.why_not: str | None = None
        self.threads = "one"
        self.memory_limit = 0
        try:
            self._load()
        except (OSError, AttributeError, ValueError) as error:
            self.why_not = str(error)

    def _load(self) -> None:
        library = ctypes.CDLL(find_library(os.path.dirname(__file__)))
        library.linattn_isa.restype = c_char_p
        version = getattr(library, "linattn_abi_version", None)
        if version is None or version() != ABI_VERSION:
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
        self.linear_decode = library.linattn_linear_decode
        self.linear_decode.argtypes = [c_void_p] * 9 + [c_int64, c_uint64]
        self.linear_decode.restype = c_int32
        self.nearfar_decode = library.linattn_nearfar_decode
        at, number = c_void_p, c_int64
        self.nearfar_decode.argtypes = [at, number, at, at, at, at, number, at, at, at, at]
        self.nearfar_decode.restype = c_int32
        self.linear_forward = library.linattn_linear_forward
        self.linear_forward.argtypes, self.linear_forward.restype = [at, at, at, at, at, number, c_int32], c_int32
        self.checksum = library.linattn_checksum
        self.checksum.argtypes, self.checksum.restype = [at, number], c_uint64
        self.pool_alloc, self.pool_free = library.linattn_pool_alloc, library.linattn_pool_free
        self.pool_alloc.argtypes, self.pool_alloc.restype = [c_int32, POINTER(c_int64)], c_void_p
        self.pool_free.argtypes, self.pool_free.restype = [c_void_p], None
        self.pool_trim = library.linattn_pool_trim
        self.pool_trim.argtypes, self.pool_trim.restype = [c_int64], c_int64
        library.linattn_pool_set_limit.argtypes, library.linattn_pool_set_limit.restype = [c_int64], None
        self.memory_limit = _memory_limit()
        library.linattn_pool_set_limit(self.memory_limit)
        self._library = library
        self._use_torch_threads()
        wanted = os.environ.get("LINATTN_ISA")
        if wanted:
            self.set_isa(wanted)

    def _use_torch_threads(self) -> None:
        """Hands over torch's own parallel loop, so that torch.set_num_threads holds and pools do not fight."""
        try:
            loop = ctypes.CDLL(torch_library()).torch_parallel_for
        except (OSError, AttributeError):
            return
        self._library.linattn_set_parallel_for(loop)
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
