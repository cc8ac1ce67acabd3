"""Specification of the tensors of a state, and the function that checks them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOST = 2**62  # of a count: adding the tokens of a call must not overflow
FEW = 64  # numbers: reading these in Python takes less time than one operator of torch
LARGEST_LOG = 1e30  # sums of two of them, in units of log2, are still floats
WORDS = {
    "H": "kv heads",
    "r": "features",
    "M": "value dim",
    "D": "dim",
    "D1": "dim + 1",
    "E": "dim + value dim",
    "W": "dim + value dim",
    "G": "query heads per kv head",
    "N": "tokens",
    "T": "near tokens",
    "C": "slots",
    "R": "kv heads with recall",
    "Ch": "channels",
    "n": "state size",
    "W1": "width - 1",
}


class Spec(NamedTuple):
    """One tensor of a state: its dimensions behind the batch dimensions, by name, and the kind of its numbers.

    kind: "float"; "statistic", a float that may have left its range; "log", a float between -1e30 and 1e30, or
    -inf for the logarithm of 0; "count", an integer >= 0; "flag", a bool; "code" and "entry", a float or an int8, which
    must be finite if it is an entry.
    """

    dims: tuple[str, ...]
    kind: str = "float"
    optional: bool = False


DTYPES = {
    "float": FLOATS,
    "statistic": FLOATS,
    "log": FLOATS,
    "count": INTEGERS,
    "flag": (torch.bool,),
    "code": (*FLOATS, torch.int8),
    "entry": (*FLOATS, torch.int8),
}
_FLOATING = "must be float16, bfloat16, float32 or float64"
EXPECTED = {
    "float": _FLOATING,
    "statistic": _FLOATING,
    "log": _FLOATING,
    "count": "must be integers",
    "flag": "must be bool",
    "code": "must be floating point or int8",
    "entry": "must be floating point or int8",
}


def check_shapes(tensors: Mapping[str, object], table: Mapping[str, Spec]) -> tuple[tuple[int, ...], dict[str, int]]:
    """The batch dimensions and every named size, or a ValueError that names the first tensor that does not fit."""
    batch: tuple[int, ...] | None = None
    sizes: dict[str, int] = {}
    device = None
    for name, (dims, kind, may_lack) in table.items():
        x = tensors.get(name)
        if x is None:
            if not may_lack:
                raise ValueError(f"it has no {name}.")
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"its {name} must be a tensor, got {type(x).__name__}.")
        if x.layout is not torch.strided or x.is_nested:
            raise ValueError(f"its {name} must be a dense tensor.")
        if x.dtype not in DTYPES[kind]:
            raise ValueError(f"its {name} {EXPECTED[kind]}, got {x.dtype}.")
        if device is not None and x.device != device:
            raise ValueError(f"its tensors must be on one device, got {device} and {x.device} ({name}).")
        device = x.device
        lead, got = x.dim() - len(dims), tuple(x.shape)
        if lead < 0:
            raise ValueError(f"its {name} must be {_words(dims)}, got shape {got}.")
        batch = got[:lead] if batch is None else batch
        want = (*batch, *(sizes.setdefault(dim, size) for dim, size in zip(dims, got[lead:], strict=False)))
        if got != want:
            raise ValueError(f"its {name} must be {_words(dims)} = {want} beside its other tensors, got shape {got}.")
    return batch or (), sizes


def _words(dims: tuple[str, ...]) -> str:
    return f"({', '.join(['batch', *(WORDS.get(dim, dim) for dim in dims)])})"


def check_values(tensors: Mapping[str, Tensor], table: Mapping[str, Spec], finite: bool = False) -> None:
    """Counts are not negative and logarithms are in range; with `finite`, floats are finite too."""
    for name, x in tensors.items():
        kind = table[name].kind
        if x.numel() == 0:
            continue
        if kind == "count":
            low, high = extremes(x)
            if low < 0 or high > MOST:
                raise ValueError(f"its {name} must lie between 0 and 2^62, got {low if low < 0 else high}.")
        elif kind == "log":
            if not _are_logs(x):
                raise ValueError(f"its {name} must lie between -1e30 and 1e30, or be -inf for the logarithm of 0.")
        elif finite and kind in ("float", "entry") and not bool(torch.isfinite(x).all()):
            raise ValueError(f"its {name} must be finite, but holds NaN or infinity.")


def _are_logs(x: Tensor) -> bool:
    if x.numel() <= FEW:
        return all(abs(y) < LARGEST_LOG or y == -math.inf for y in x.flatten().tolist())
    return bool(((x.abs() < LARGEST_LOG) | (x == -torch.inf)).all())


def extremes(counts: Tensor) -> tuple[int, int]:
    """Minimum and maximum."""
    if counts.numel() <= FEW:
        numbers = counts.flatten().tolist()
        return min(numbers), max(numbers)
    low, high = counts.aminmax()
    return int(low), int(high)


def cast(x: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The tensor as the engines need it: floats in `dtype`, counts in int64, no lazy negation."""
    if kind in ("float", "statistic", "log") or (kind == "entry" and x.is_floating_point()):
        x = x if x.dtype == dtype else x.to(dtype)
    elif kind == "count":
        x = x if x.dtype == torch.int64 else x.to(torch.int64)
    if not torch.compiler.is_compiling() and x.is_neg():
        x = x.resolve_neg()
    return x
