"""Near/far attention in the native library: a state in its native form, and tensors into pointers.

Callers have checked everything before. Shapes are those of state.py; all tensors but the tokens and the state's entries are
float32.
"""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..engines.native import output_pool
from ..engines.native.bindings import DTYPES, check_flags, rows
from ..engines.native.ffi import NOT_FINITE, NearFarCall, library
from ..engines.native.output_pool import FLOATS
from ..states import finite
from ..states.base import pack_of
from .kernel import refuse_overflow
from .native_far_cache import PackedFarCache, far_cache_call
from .native_form import NativeForm
from .positions import Growth, Positions
from .state import NearFarState, slots_per_head

ENTRY_DTYPES = {32: 0, 16: 1, 8: 3}  # of csrc/core/abi.h, by the bits of a state


class Inputs(NamedTuple):
    """The tokens of one call: query (B, Hq, L, D) or None, key (B, H, L, D), value (B, H, L, M), mask (B, L) or None.

    counts: the visible tokens of each sequence. attend: False if the queries only supply statistics.
    """

    form: NativeForm
    query: Tensor | None
    key: Tensor
    value: Tensor
    mask: Tensor | None
    counts: list[int]
    attend: bool


@dataclass(slots=True)
class NearBuffer:
    """Near tokens with free places behind them, shared by the states of successive decoding steps.

    Attributes:
        tokens: (B, H, places, E). A state sees some of the tokens, the next state one more.
        filled: how many places are taken. Only the state that ends there may take the next one.
        prepared: the native call that all steps on this buffer share.
    """

    tokens: Tensor
    filled: int
    prepared: "PreparedDecode | None" = None

    def take(self, end: int) -> bool:
        """Takes the place at `end`; False if it is not free."""
        with _taking:
            free = self.filled == end and end < self.tokens.shape[2]
            self.filled += free
        return free


_taking = threading.Lock()


@dataclass(slots=True)
class PackedState:
    """The native form of a NearFarState: positions are Python numbers, near tokens are part of a larger buffer.

    The library's own results are passed on in this form and need no validation: nothing else has seen their tensors.

    Attributes:
        buffer, end, near_length: the near tokens are the `near_length` places of the buffer before `end`.
    """

    signature: str
    buffer: NearBuffer
    end: int
    near_length: int
    positions: Positions
    sink: Tensor
    slots: Tensor
    bias: Tensor
    received: Tensor
    near_received: Tensor
    moments: Tensor
    queries: Tensor
    far: PackedFarCache | None = None

    @staticmethod
    def of(state: NearFarState, form: NativeForm) -> "PackedState":
        """Of a validated state with one batch dimension."""
        pack: PackedState | None = pack_of(state)
        if pack is not None:
            return pack
        near, (buffer, end) = state.near, _buffer_of(state, form)
        sink, slots = state.sink.to(form.entry_dtype), state.slots.to(form.entry_dtype)
        rest = sink, slots, state.bias, state.received, state.near_received, state.moments, state.queries
        known = state.__dict__.get("_unpacked")
        far = PackedFarCache.of(state, form, known.far if isinstance(known, PackedState) else None)
        return PackedState(state.kernel, buffer, end, near.shape[2], state.positions, *rest, far)

    @property
    def near(self) -> Tensor:
        """(B, H, T, E)."""
        return self.buffer.tokens.narrow(2, self.end - self.near_length, self.near_length)

    def tensors(self) -> dict[str, Tensor]:
        """The fields of NearFarState."""
        tokens, merged, entered = (torch.tensor(n, dtype=torch.int64, device="cpu") for n in self.positions)
        return {
            "sink": self.sink,
            "near": self.near,
            "slots": self.slots,
            "bias": self.bias,
            "received": self.received,
            "near_received": self.near_received,
            "moments": self.moments,
            "queries": self.queries,
            "tokens": tokens,
            "merged": merged,
            "entered": entered,
            **({} if self.far is None else self.far.tensors()),
        }


def _buffer_of(state: NearFarState, form: NativeForm) -> tuple[NearBuffer, int]:
    """A buffer that ends in the near tokens, and where: the one they were written to, if they still lie there."""
    near, known = state.near, state.__dict__.get("_unpacked")
    if isinstance(known, PackedState) and known.near_length == near.shape[2]:
        place = known.near
        if near.data_ptr() == place.data_ptr() and near.shape == place.shape and near.stride() == place.stride():
            return known.buffer, known.end
    return NearBuffer(near.to(form.entry_dtype), near.shape[2]), near.shape[2]


def advance(
    inputs: Inputs, state: PackedState, spare: int = 0, merges: Tensor | None = None, growth: Growth | None = None
) -> tuple[Tensor | None, PackedState]:
    """Adds keys with their queries, or None: rows (B, Hq, L, M) if they attend, and the state after them.

    spare: free places behind the near tokens, for decoding steps to come. merges: takes what the merges decided, in the
    shape of `merges_shape`. growth: of this state and call, where it is known already.
    """
    form, query, counts, mask = inputs.form, inputs.query, inputs.counts, inputs.mask
    B, H, L, _ = inputs.key.shape
    M = inputs.value.shape[-1]
    if max(counts, default=0) == 0:
        return FLOATS.new_zeros(B, 0 if query is None else query.shape[1], L, M) if inputs.attend else None, state
    if growth is None:
        held = slots_per_head(form.budgets, state.slots.shape[1])
        growth = state.positions.growth(form, form.budgets, held, counts)
    used, grown, after = growth
    far = None if state.far is None else state.far.after(form, state.positions, after)
    call, alive = prepare_call(inputs, state, used, far)
    if merges is not None:
        set_merges(call, form, merges)
    length, total = min(form.window + form.block, state.near_length + L), sum(grown)
    width, dtype = state.sink.shape[3], state.sink.dtype  # of an entry
    near, sink, slots = (
        FLOATS.new_empty(*shape, width, dtype=dtype)
        for shape in ((B, H, length + spare), (B, H, form.sinks), (B, total))
    )
    bias, received = FLOATS.new_empty(B, total), FLOATS.new_empty(B, total, 2)
    near_received, moments, queries = (
        FLOATS.new_empty(*x.shape) for x in (state.near_received, state.moments, state.queries)
    )
    call.sink_new, call.near_new = sink.data_ptr(), near.data_ptr()
    call.slot_new, call.bias_new, call.received_new, call.near_received_new = (
        x.data_ptr() for x in (slots, bias, received, near_received)
    )
    call.moments_new, call.query_samples_new = moments.data_ptr(), queries.data_ptr()
    call.near_tokens_new, call.slots_new = length, total
    call.near_new_stride[0], call.near_new_stride[1] = near.stride()[:2]
    first = offsets(grown)
    call.first_slot_new = ctypes.addressof(first)
    out = None
    if mask is not None:
        mask = mask.contiguous()
        call.mask = mask.data_ptr()
    if inputs.attend and query is not None:
        # Rows of hidden tokens are not written.
        out = (output_pool.empty if mask is None else FLOATS.new_zeros)(B, query.shape[1], L, M)
        call.out = out.data_ptr()
    flags = library.nearfar_prefill(ctypes.byref(call))
    del alive
    if flags:
        _fail(flags, query, inputs.key, inputs.value, state, form.sqrt_scale)
    buffer, rest = NearBuffer(near, length), (sink, slots, bias, received, near_received, moments, queries, far)
    return out, PackedState(state.signature, buffer, length, length, after, *rest)


def merges_shape(form: NativeForm, key: Tensor, seen: Sequence[int]) -> tuple[int, int, int, int]:
    """Of what the merges of a call with key (B, H, L, D) decide: one record for each block that the tokens may touch.

    seen: the tokens before, of each sequence; nothing for none.
    """
    B, H, L, D = key.shape
    blocks = max([-(-(t % form.block + L) // form.block) for t in seen or [0]])
    return B, H, blocks, 2 * (max(form.budgets, default=0) + form.block) + D


def set_merges(call: NearFarCall, form: NativeForm, merges: Tensor) -> None:
    """Makes a call read or write such a tensor."""
    call.merges, call.merge_blocks = merges.data_ptr(), merges.shape[2]
    call.merge_rows = max(form.budgets, default=0) + form.block


class PreparedDecode:
    """One-token calls inside a block, on one buffer of near tokens: what all of them share is set once.

    plan: of the caller, to be compared by later calls.
    """

    __slots__ = ("_address", "_alive", "_call", "_entry_bytes", "_first", "_near_at", "_out_shape", "plan")

    def __init__(self, plan: object, inputs: Inputs, state: PackedState):
        """state: whose end is the place of the first token."""
        self.plan, near = plan, state.buffer.tokens
        self._call, self._alive = prepare_call(inputs, state, slots_per_head(inputs.form.budgets, state.slots.shape[1]))
        self._call.near_new_stride[0], self._call.near_new_stride[1] = near.stride()[:2]
        self._address, self._first = ctypes.addressof(self._call), state.end
        self._out_shape = self._call.batch, self._call.heads, 1, self._call.value_dim
        self._near_at, self._entry_bytes = near.data_ptr(), near.element_size() * near.shape[3]

    def run(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        state: PackedState,
        near: int,
        new: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Rows (B, Hq, 1, M) of a token that is written to the end of the state and sees its last `near` near tokens.

        new: tensors for new samples of queries and new moments, or None where these stay the same.
        """
        query, key, value = tokens
        if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        queries, moments = new
        out, end = FLOATS.new_empty(*self._out_shape), state.end
        flags = library.nearfar_decode(
            self._address,
            end - self._first,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            self._near_at + (end - near) * self._entry_bytes,
            near,
            state.queries.data_ptr(),
            None if queries is None else queries.data_ptr(),
            None if moments is None else moments.data_ptr(),
            out.data_ptr(),
        )
        if flags:
            _fail(flags, query, key, value, state, self._call.sqrt_scale)
        return out


def prepare_call(
    inputs: Inputs, state: PackedState, slots: Sequence[int], far: PackedFarCache | None = None
) -> tuple[NearFarCall, list[object]]:
    """A call with its inputs, and the objects that must stay alive until it is over.

    slots: of each head. far: the far tokens after the call, None if it merges nothing.
    """
    call, form = NearFarCall(), inputs.form
    key, value = (x if x.is_contiguous() else rows(x) for x in (inputs.key, inputs.value))
    call.batch, call.kv_heads, call.tokens, call.dim = key.shape
    call.heads, call.value_dim = state.queries.shape[2] * call.kv_heads, value.shape[-1]
    call.window, call.sinks, call.block, call.stride = form.window, form.sinks, form.block, form.stride
    call.threads, call.dtype = torch.get_num_threads(), DTYPES[key.dtype]
    call.entry_dtype = ENTRY_DTYPES[form.state_bits]
    call.sqrt_scale, call.alpha, call.logit_cap = form.sqrt_scale, form.alpha, form.logit_cap
    if form.band is not None:
        call.reach, call.band = form.band.shape[1], form.band.data_ptr()
    call.key, call.value = key.data_ptr(), value.data_ptr()
    call.key_stride[:] = key.stride()[:3]
    call.value_stride[:] = value.stride()[:3]
    alive: list[object] = [key, value]
    if inputs.query is not None:
        query = inputs.query if inputs.query.is_contiguous() else rows(inputs.query)
        alive.append(query)
        call.query = query.data_ptr()
        call.query_stride[:] = query.stride()[:3]
    near = state.near
    if near.stride(-1) != 1 or near.stride(-2) != near.shape[-1]:
        near = near.contiguous()
    call.near, call.near_tokens = near.data_ptr(), near.shape[2]
    call.near_stride[0], call.near_stride[1] = near.stride()[:2]
    held = [x.contiguous() for x in (state.sink, state.slots, state.bias, state.received, state.near_received)]
    held += [state.moments.contiguous(), state.queries.contiguous()]
    call.sink, call.slot, call.bias, call.received, call.near_received, call.moments, call.query_samples = (
        x.data_ptr() for x in held
    )
    call.slots = sum(slots)
    seen, merged, entered = state.positions
    numbers = [_integers(x) for x in (seen, inputs.counts, merged, entered, form.budgets)]
    numbers.append(offsets(slots))
    call.seen, call.counts, call.merged, call.entered, call.budgets, call.first_slot = (
        ctypes.addressof(x) for x in numbers
    )
    if state.far is not None:
        far_call, more = far_cache_call(form, call.dim, state.far, far)
        call.far = ctypes.addressof(far_call)
        alive += more
    return call, [*alive, near, *held, *numbers, form.band]


def _fail(
    flags: int, query: Tensor | None, key: Tensor, value: Tensor, state: PackedState, sqrt_scale: float
) -> NoReturn:
    """Raises the error of a call; NaN and infinity are looked for in all of its inputs."""
    if flags & NOT_FINITE:
        inputs = {"key": key, "value": value} | ({} if query is None else {"query": query})
        if state.slots.dtype == torch.float16:
            refuse_overflow(key.float() * sqrt_scale, value)
        finite.refuse(torch.float32, **inputs, **finite.of_state(NearFarState(state.signature, **state.tensors())))
    check_flags(flags)
    raise AssertionError(f"the native library returned unknown flags {flags}")


def _integers(x: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * max(1, len(x)))(*x)


def offsets(sizes: Sequence[int]) -> ctypes.Array[c_int64]:
    """Where the slots of each head begin."""
    return _integers([0, *accumulate(sizes)][:-1])
