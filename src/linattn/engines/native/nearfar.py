"""Near/far attention: tensors into pointers. linattn.nearfar.native says when these are called."""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.nearfar import NearFar
from . import memory
from .calls import DTYPES, _rows, _run, check_flags
from .library import MergeCall, NearFarCall, library
from .memory import FLOATS


class Held(NamedTuple):
    """A memory of all kv heads, slots one head after the other: see linattn.nearfar.state. float32."""

    sink: Tensor
    near: Tensor
    slots: Tensor
    bias: Tensor
    moments: Tensor
    queries: Tensor


class Places(NamedTuple):
    """Where each row of the batch stands, and how many slots each kv head has before and after the call."""

    seen: list[int]
    counts: list[int]
    merged: list[int]
    slots: Sequence[int]
    slots_new: Sequence[int]


def walk(
    kernel: NearFar,
    root: float,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    held: Held,
    places: Places,
    attend: bool,
    spare: int = 0,
) -> tuple[Tensor | None, Held, "Steps"]:
    """Goes on by tokens (B, H, L, .) and their queries (B, Hq, L, D), or None: rows (B, Hq, L, M), and what is held then.

    spare: places behind the near tokens, for single tokens that come next.
    """
    call, keep = _prepare(kernel, root, query, key, value, held, places)
    B, H, L, D = key.shape
    M, E, width = value.shape[-1], D + value.shape[-1], kernel.window + kernel.block
    if mask is not None:
        keep.append(mask := mask.contiguous())
        call.mask = mask.data_ptr()
    tokens = min(width, held.near.shape[2] + L)
    total = sum(places.slots_new)
    near = FLOATS.new_empty(B, H, tokens + spare, E)
    new = Held(
        FLOATS.new_empty(B, H, kernel.sinks, E),
        near[:, :, :tokens],
        FLOATS.new_empty(B, total, E),
        FLOATS.new_empty(B, total),
        torch.empty_like(held.moments, memory_format=torch.contiguous_format),
        torch.empty_like(held.queries, memory_format=torch.contiguous_format),
    )
    _set_new(call, new)
    call.slots_new = total
    keep.append(first := _firsts(places.slots_new))
    call.first_slot_new = ctypes.addressof(first)
    out = None
    if attend and query is not None:
        out = (memory.empty if mask is None else FLOATS.new_zeros)(B, query.shape[1], L, M)
        call.out = out.data_ptr()
    _run(library.nearfar_walk, call, keep)
    return out, new, Steps(near, tokens)


class Steps:
    """One-token calls inside a block: near tokens with room behind them, and what all of these calls share.

    buffer: (B, H, places, E). A state sees some of the tokens, the next state one more; `filled` places are taken. Only the
    state that ends there may take the next one.
    """

    _lock = threading.Lock()

    def __init__(self, buffer: Tensor, filled: int):
        self.buffer, self.filled, self.first = buffer, filled, filled
        self.about: tuple[Any, ...] = ()
        self.seen: list[int] = []

    def take(self, end: int) -> bool:
        """Whether the place at `end` was free, and is the caller's now."""
        with Steps._lock:
            free = self.filled == end and end < self.buffer.shape[2]
            self.filled += free
        return free

    def prepare(
        self,
        about: tuple[Any, ...],
        kernel: NearFar,
        root: float,
        tokens: tuple[Tensor, Tensor, Tensor],
        held: Held,
        places: Places,
    ) -> None:
        """about: whatever a later call must have in common with this one. places: when `first` places were taken."""
        query, key, value = (x.contiguous() for x in tokens)
        self.call, self.keep = _prepare(kernel, root, query, key, value, held, places)
        self.call.near_new_stride[0], self.call.near_new_stride[1] = self.buffer.stride()[:2]
        self.address, self.seen, self.about = ctypes.addressof(self.call), places.seen, about
        self.out_shape = *query.shape[:3], value.shape[-1]
        self.near_at, self.entry_bytes = self.buffer.data_ptr(), 4 * self.buffer.shape[3]

    def run(
        self, first: int, end: int, tokens: tuple[Tensor, Tensor, Tensor], statistics: tuple[Tensor, Any, Any]
    ) -> Tensor:
        """Rows (B, Hq, 1, M) of a token that goes to the place `end` and sees the near tokens from `first` on.

        statistics: the block's samples; new tensors for them, and for the moments, or None where they stay as they are.
        """
        query, key, value = tokens
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        queries, new, moments = statistics
        out = FLOATS.new_empty(*self.out_shape)
        flags = library.nearfar_step(
            self.address,
            end - self.first,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            self.near_at + first * self.entry_bytes,
            end - first,
            queries.data_ptr(),
            None if new is None else new.data_ptr(),
            None if moments is None else moments.data_ptr(),
            out.data_ptr(),
        )
        check_flags(flags)
        return out


def merge(
    entries: Tensor, bias: Tensor, size: int, anchor: Tensor, metric: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """linattn.nearfar.slots.merge: entries (B, H, n, E), bias (B, H, n), anchor (B, H, 1, D), metric (B, H, D, D)."""
    B, H, n, E = entries.shape
    D = metric.shape[-1]
    keep = [x.contiguous() for x in (entries, bias, anchor, metric)]
    new = FLOATS.new_empty(B, H, size, E), FLOATS.new_empty(B, H, size), torch.empty(B, H, n, dtype=torch.int64)
    call = MergeCall(problems=B * H, slots=n, size=size, dim=D, value_dim=E - D, alpha=alpha)
    call.threads = torch.get_num_threads()
    call.slot, call.bias, call.anchor, call.metric = (x.data_ptr() for x in keep)
    call.slot_new, call.bias_new, call.place = (x.data_ptr() for x in new)
    _run(library.merge_slots, call, keep)
    return new


def _prepare(
    kernel: NearFar, root: float, query: Tensor | None, key: Tensor, value: Tensor, held: Held, places: Places
) -> tuple[NearFarCall, list[Any]]:
    """A call with everything but what it writes to; and what must live until it is over."""
    call = NearFarCall()
    call.batch, call.kv_heads, call.tokens, call.dim = key.shape
    call.heads, call.value_dim = held.queries.shape[2] * call.kv_heads, value.shape[-1]
    call.window, call.sinks, call.block, call.stride = kernel.window, kernel.sinks, kernel.block, kernel.stride
    call.threads, call.dtype, call.root, call.alpha = torch.get_num_threads(), DTYPES[key.dtype], root, kernel.alpha
    key, value = _rows(key), _rows(value)
    call.key, call.value = key.data_ptr(), value.data_ptr()
    call.key_stride[:] = key.stride()[:3]
    call.value_stride[:] = value.stride()[:3]
    keep: list[Any] = [key, value]
    if query is not None:
        keep.append(query := _rows(query))
        call.query = query.data_ptr()
        call.query_stride[:] = query.stride()[:3]
    near = held.near
    E = near.shape[-1]
    if near.stride(-1) != 1 or near.stride(-2) != E:
        near = near.contiguous()
    call.near, call.held = near.data_ptr(), near.shape[2]
    call.near_stride[0], call.near_stride[1] = near.stride()[:2]
    rest = [x if x.is_contiguous() else x.contiguous() for x in (held.sink, *held[2:])]
    call.sink, call.slot, call.bias, call.moments, call.queries = (x.data_ptr() for x in rest)
    call.slots = sum(places.slots)
    numbers = [_numbers(x) for x in (places.seen, places.counts, places.merged, kernel.budgets(call.kv_heads))]
    numbers.append(_firsts(places.slots))
    call.seen, call.counts, call.merged, call.budgets, call.first_slot = (ctypes.addressof(x) for x in numbers)
    return call, [*keep, near, *rest, *numbers]


def _set_new(call: NearFarCall, new: Held) -> None:
    call.sink_new, call.near_new, call.slot_new, call.bias_new, call.moments_new, call.queries_new = (
        x.data_ptr() for x in new
    )
    call.held_new = new.near.shape[2]
    call.near_new_stride[0], call.near_new_stride[1] = new.near.stride()[:2]


def _numbers(x: Any) -> Any:
    return (c_int64 * max(1, len(x)))(*x)


def _firsts(sizes: Sequence[int]) -> Any:
    """Where each head's slots begin."""
    firsts, at = [], 0
    for size in sizes:
        firsts.append(at)
        at += size
    return _numbers(firsts)
