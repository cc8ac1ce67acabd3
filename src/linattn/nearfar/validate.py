"""Checks a near/far state against its kernel: every size and every index that an engine relies on."""

from dataclasses import replace

import torch

from ..kernels.base import is_plain
from ..states.base import UNUSABLE
from ..states.layout import FLOATS
from .far_cache import FarCache
from .kernel import NearFar
from .state import NearFarState, share_slots


def check_kernel(state: NearFarState, sizes: dict[str, int], kernel: NearFar, groups: int, dim: int) -> None:
    """Checks a validated state, of these named sizes, against its kernel, query heads per kv head and dim."""
    held = sizes["G"], sizes["D1"] - 1
    if held != (groups, dim):
        raise ValueError(
            f"this state was made with {held[0]} query heads per kv head of dim {held[1]}; the call has {groups} of dim {dim}."
        )
    try:
        _check_sizes(sizes, kernel)
        if (sizes["W"] > sizes["E"]) != (kernel.state_bits == 8):
            stored = "codes in 8 bits" if sizes["W"] > sizes["E"] else "floating-point numbers"
            raise ValueError(f"it holds {stored}; its kernel stores {kernel.state_bits} bits.")
        if any(kernel.recalls(sizes["H"])):
            _check_recall(state, sizes, kernel)
        elif "R" in sizes:
            raise ValueError("it keeps far tokens, but its kernel has no recall.")
    except ValueError as error:
        raise ValueError(f"{UNUSABLE}{error}") from None


def cast_recall(state: NearFarState, sizes: dict[str, int], kernel: NearFar, dtype: torch.dtype) -> NearFarState:
    """With far tokens in the type that the kernel stores them in, in case the state was moved to another."""
    if "R" not in sizes or state.far_entries is None or state.far_bounds is None:
        return state
    entries, bounds = FarCache.dtypes(kernel.recall_bits, dtype).values()
    if state.far_entries.dtype == entries and state.far_bounds.dtype == bounds:
        return state
    return replace(state, far_entries=state.far_entries.to(entries), far_bounds=state.far_bounds.to(bounds))


def _check_sizes(sizes: dict[str, int], kernel: NearFar) -> None:
    samples = kernel.block // kernel.stride
    if sizes["window"] != kernel.window:
        raise ValueError(f"it has a window of {sizes['window']} tokens; its kernel has {kernel.window}.")
    if sizes["sinks"] != kernel.sinks:
        raise ValueError(f"it has {sizes['sinks']} sinks; its kernel has {kernel.sinks}.")
    if sizes["samples"] != samples:
        raise ValueError(f"it has {sizes['samples']} sampled queries for a block; its kernel takes {samples}.")
    budgets = kernel.budgets(sizes["H"])
    if sum(share_slots(budgets, sizes["C"])) != sizes["C"]:
        raise ValueError(f"it has {sizes['C']} slots, which heads with budgets of {list(budgets)} never have together.")


def _check_recall(state: NearFarState, sizes: dict[str, int], kernel: NearFar) -> None:
    if state.far_entries is None or state.far_bounds is None or state.far_slot is None:
        raise ValueError("its kernel has recall, but it keeps no far tokens.")
    H, dim, unit, bits = sizes["H"], sizes["D1"] - 1, kernel.recall_unit, kernel.recall_bits
    heads = [h for h, blocks in enumerate(kernel.recalls(H)) if blocks > 0]
    if sizes["R"] != len(heads):
        raise ValueError(f"it keeps the far tokens of {sizes['R']} kv heads; {len(heads)} have recall.")
    if sizes["cells"] != sizes["units"] * unit:
        raise ValueError(f"it has bounds of {sizes['units']} blocks of {unit} for {sizes['cells']} far tokens.")
    width = 2 * dim + (unit if bits == 8 else 0)
    if sizes["width"] != width:
        raise ValueError(f"its bounds must be {width} wide, got {sizes['width']}.")
    if (state.far_entries.dtype == torch.int8) != (bits == 8) or state.far_bounds.dtype not in FLOATS:
        raise ValueError(
            f"its far tokens are {state.far_entries.dtype} with bounds in {state.far_bounds.dtype}; "
            f"its kernel stores {bits} bits."
        )
    if not is_plain(*state.tensors().values()):
        return
    merged = int(state.merged.max()) if state.merged.numel() else 0
    if merged > kernel.sinks and merged + kernel.window % kernel.block > sizes["cells"]:
        raise ValueError(f"it keeps {sizes['cells']} far tokens, but its slots hold {merged}.")
    if state.far_slot.numel() == 0:
        return
    budgets = kernel.budgets(H)
    slots = share_slots(budgets, sizes["C"])
    limits = [slots[h] if budgets[h] else kernel.block for h in heads]
    if bool((state.far_slot >= torch.tensor(limits).unsqueeze(-1)).any()):
        raise ValueError("its far tokens name slots (far_slot) that it does not have.")
