"""The far tokens of heads with recall in the native library: a buffer that grows, and the structure a call takes.

Entries and bounds never change once they are written, so the states of successive calls share them: each sees the first cells
of a buffer, and the state that ends where the buffer ends may write the next ones.
"""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from ..engines.native.ffi import FarCacheCall
from ..engines.native.output_pool import COUNTS, FLOATS
from .biases import SLOPE_UNIT, TABLE_UNIT
from .native_form import NativeForm
from .positions import Positions
from .state import NearFarState

_taking = threading.Lock()


@dataclass(slots=True)
class FarBuffer:
    """Far tokens with free cells behind them.

    Attributes:
        entries, bounds: (B, R, capacity, E) and (B, R, capacity / unit, width), as in FarCache.
        ends: by sequence, the first cell that is free. Only a state that ends there may take it.
        seen: True if others have the tensors of a state. From then on not even its empty cells may be written.
    """

    entries: Tensor
    bounds: Tensor
    ends: list[int]
    seen: bool = False

    def take(self, ends: list[int], new_ends: list[int], cells: int, new_cells: int) -> bool:
        """Takes the cells up to `new_ends` for a state with these ends and cells; False if they are not free."""
        moved = [end for end, new in zip(ends, new_ends, strict=True) if new > end]
        with _taking:
            free = self.ends == ends and new_cells <= self.entries.shape[2]
            free = free and not (self.seen and min(moved, default=cells) < cells)
            if free:
                self.ends = new_ends
        return free


@dataclass(slots=True)
class PackedFarCache:
    """The far tokens of a state in the native library.

    Attributes:
        buffer, cells: the far tokens are the first `cells` of the buffer.
        slot, log_share: (B, R, cells), contiguous, as in FarCache.
    """

    buffer: FarBuffer
    cells: int
    slot: Tensor
    log_share: Tensor

    @staticmethod
    def of(state: NearFarState, form: NativeForm, known: "PackedFarCache | None" = None) -> "PackedFarCache | None":
        """Of a validated state; None without recall. known: what it was unpacked from, if its tensors still lie there."""
        if state.far_entries is None or state.far_bounds is None or state.far_slot is None:
            return None
        assert state.far_log_share is not None
        cells = state.far_entries.shape[2]
        slot, log_share = state.far_slot.contiguous(), state.far_log_share.contiguous()
        if known is not None and known.cells == cells:
            places = zip(known.views(), (state.far_entries, state.far_bounds), strict=True)
            if all(a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() for a, b in places):
                return PackedFarCache(known.buffer, cells, slot, log_share)
        entries, bounds = state.far_entries.contiguous(), state.far_bounds.contiguous()
        buffer = FarBuffer(entries, bounds, _ends(form, state.positions), seen=True)
        return PackedFarCache(buffer, cells, slot, log_share)

    def views(self) -> tuple[Tensor, Tensor]:
        """far_entries and far_bounds of a NearFarState."""
        entries, bounds = self.buffer.entries, self.buffer.bounds
        unit = max(1, entries.shape[2] // max(1, bounds.shape[2]))
        return entries.narrow(2, 0, self.cells), bounds.narrow(2, 0, self.cells // unit)

    def tensors(self) -> dict[str, Tensor]:
        """The fields of NearFarState."""
        self.buffer.seen = True
        entries, bounds = self.views()
        return {
            "far_entries": entries,
            "far_bounds": bounds,
            "far_slot": self.slot,
            "far_log_share": self.log_share,
        }

    def after(self, form: NativeForm, before: Positions, after: Positions) -> "PackedFarCache":
        """Room for the tokens that are merged from one position to the other; slots and shares hold nothing yet."""
        starts = _ends(form, before)
        ends = [max(a, b) for a, b in zip(starts, _ends(form, after), strict=True)]
        written = [end for start, end in zip(starts, ends, strict=True) if end > start]
        cells = max([self.cells, *written])
        buffer = self.buffer
        if not buffer.take(starts, ends, self.cells, cells):
            buffer = self._grown(form, cells, ends)
        if cells > self.cells:
            self._clear(form, buffer, starts, ends, cells)
        B, R = self.slot.shape[:2]
        return PackedFarCache(buffer, cells, COUNTS.new_empty(B, R, cells), FLOATS.new_empty(B, R, cells))

    def _grown(self, form: NativeForm, cells: int, ends: list[int]) -> FarBuffer:
        """A copy with room for `cells`, and a quarter more if there were any before: more calls will follow."""
        spare = cells // 4 // form.block * form.block + form.block if self.cells else 0
        old_entries, old_bounds = self.views()
        B, R, _, E = old_entries.shape
        entries = old_entries.new_empty(B, R, cells + spare, E)
        bounds = old_bounds.new_empty(B, R, (cells + spare) // form.recall_unit, old_bounds.shape[3])
        entries[:, :, : self.cells], bounds[:, :, : self.cells // form.recall_unit] = old_entries, old_bounds
        return FarBuffer(entries, bounds, ends)

    def _clear(self, form: NativeForm, buffer: FarBuffer, starts: list[int], ends: list[int], cells: int) -> None:
        """Zeros in the new cells that no token of this call is written to."""
        unit = form.recall_unit
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for first, last in (
                (self.cells, min(start, cells)),
                (max(self.cells, end if end > start else start), cells),
            ):
                if first < last:
                    buffer.entries[b, :, first:last] = 0
                    buffer.bounds[b, :, first // unit : last // unit] = 0


def far_cache_call(
    form: NativeForm, dim: int, before: PackedFarCache, after: PackedFarCache | None
) -> tuple[FarCacheCall, list[object]]:
    """The structure of a call, and what must stay alive until it is over. after: None if nothing is merged."""
    now = before if after is None else after
    entries, bounds = now.buffer.entries, now.buffer.bounds
    recall, row = _integers(form.recalls), _integers([0, *accumulate(int(r > 0) for r in form.recalls)][:-1])
    call = FarCacheCall(
        heads=entries.shape[1],
        unit=form.recall_unit,
        bits=form.recall_bits,
        shift=form.window % form.block,
        capacity=entries.shape[2],
        cells=before.cells,
        cells_new=now.cells,
        position=dim - form.positions if form.positions and form.recall_bits < 32 else -1,
        position_unit=SLOPE_UNIT if form.positions == 1 else TABLE_UNIT,
        recall=ctypes.addressof(recall),
        row=ctypes.addressof(row),
        entries=entries.data_ptr(),
        bounds=bounds.data_ptr(),
        slot=before.slot.data_ptr(),
        log_share=before.log_share.data_ptr(),
        slot_new=None if after is None else after.slot.data_ptr(),
        log_share_new=None if after is None else after.log_share.data_ptr(),
    )
    return call, [call, recall, row, entries, bounds, before.slot, before.log_share]


def _ends(form: NativeForm, positions: Positions) -> list[int]:
    """The first free cell of each sequence, rounded down to a whole block."""
    shift, unit = form.window % form.block, form.recall_unit
    return [(max(merged, form.sinks) + shift) // unit * unit for merged in positions.merged]


def _integers(x: Sequence[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * max(1, len(x)))(*x)
