"""How a state stores keys and values: in the type of a call, in half precision, or in 8 bits.

Entries are (..., E), a scaled key (D) beside its value (M). In 8 bits an entry is a row of bytes: E codes between -127 and 127,
then the steps of the key and of the value, a bfloat16 for every 32 of their numbers, which the codes are multiplied with.
csrc/nearfar/entry_codes.h has the same.
"""

import torch
from torch import Tensor

LEVELS = 127
GROUP = 32  # numbers with one step
STEP_BYTES = 2
NO_GRADIENT = (
    "a near/far state in 8 bits carries no gradient: pass NearFar(state_bits=16), or call under torch.no_grad()."
)
LEAST_STEP = 2.0**-126  # smaller ones count as 0


def stored_dtype(bits: int, dtype: torch.dtype) -> torch.dtype:
    """Of entries in a state, for calls that compute in `dtype`."""
    return {16: torch.float16, 8: torch.int8}.get(bits, dtype)


def stored_width(bits: int, dim: int, value_dim: int) -> int:
    """How many elements of that type an entry takes."""
    steps = _groups(dim) + _groups(value_dim) if bits == 8 else 0
    return dim + value_dim + STEP_BYTES * steps


def value_dim_of(width: int, dim: int) -> int | None:
    """The dim of the values of entries in 8 bits that are `width` bytes wide; None if there is no such dim."""
    rest = width - dim - STEP_BYTES * _groups(dim)
    value_dim = rest - STEP_BYTES * -(-rest // (GROUP + STEP_BYTES))
    return value_dim if value_dim >= 0 and stored_width(8, dim, value_dim) == width else None


def round_entries(entries: Tensor, dim: int, bits: int) -> Tensor:
    """Entries as `decode(encode(..))` has them. Rounding twice changes nothing."""
    if bits == 8:
        return torch.cat([_times(*_codes(part)) for part in (entries[..., :dim], entries[..., dim:])], -1)
    return entries.half().to(entries.dtype) if bits == 16 else entries


def encode(entries: Tensor, dim: int, bits: int) -> Tensor:
    """Entries as a state stores them."""
    if bits != 8:
        return entries.to(stored_dtype(bits, entries.dtype))
    if entries.requires_grad:
        raise ValueError(NO_GRADIENT)
    (key, key_steps), (value, value_steps) = (_codes(part) for part in (entries[..., :dim], entries[..., dim:]))
    steps = torch.cat([key_steps, value_steps], -1).to(torch.bfloat16)
    return torch.cat([key.to(torch.int8), value.to(torch.int8), steps.view(torch.int8)], -1)


def decode(stored: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Entries (..., E) in `dtype` from what `encode` made."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    steps = steps_of(stored, dim).to(dtype)
    numbers = stored.shape[-1] - STEP_BYTES * steps.shape[-1]
    key, value = stored[..., :dim].to(dtype), stored[..., dim:numbers].to(dtype)
    groups = _groups(dim)
    return torch.cat([_times(key, steps[..., :groups]), _times(value, steps[..., groups:])], -1)


def steps_of(stored: Tensor, dim: int) -> Tensor:
    """The steps (..., groups) of keys and values in 8 bits."""
    value_dim = value_dim_of(stored.shape[-1], dim)
    assert value_dim is not None
    return stored[..., dim + value_dim :].contiguous().view(torch.bfloat16)


def _groups(numbers: int) -> int:
    return -(-numbers // GROUP)


def _times(codes: Tensor, steps: Tensor) -> Tensor:
    """Codes (..., n) times the steps (..., groups)."""
    return codes * steps.repeat_interleave(GROUP, -1)[..., : codes.shape[-1]]


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (..., n) and the steps (..., groups) between them; those of a group with NaN or infinity are NaN.

    The largest number of a group always gets the code 127 or -127, because a step is off by less than 1/256 of itself. So the
    step of a rounded group is the same again.
    """
    n, groups = x.shape[-1], _groups(x.shape[-1])
    rows = torch.nn.functional.pad(x, (0, groups * GROUP - n)).unflatten(-1, (groups, GROUP))
    steps = (rows.abs().amax(-1) / LEVELS).to(torch.bfloat16).to(x.dtype)
    steps = torch.where(steps < LEAST_STEP, 0.0, steps)
    codes = (rows / steps.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).round().clamp(-LEVELS, LEVELS)
    return codes.flatten(-2)[..., :n], torch.where(steps.isfinite(), steps, torch.nan)
