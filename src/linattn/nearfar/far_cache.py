"""The far tokens of heads with recall, stored in 32, 16 or 8 bits.

Tokens are stored in blocks of a few (`unit`), with the mean and the variance of the keys of each block. In 8 bits these also
set the quantization range: none of n keys is farther from their mean than sqrt(n - 1) standard deviations. Values are
quantized by their largest coordinate, one number per token, stored beside the bounds.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .biases import SLOPE_UNIT, TABLE_UNIT
from .kernel import NearFar

LEVELS = 127  # int8 codes on each side of 0
LARGEST_HALF = 65504  # the largest float16
DTYPES = {16: torch.float16, 8: torch.int8}


@dataclass(frozen=True)
class FarCache:
    """The far tokens of some kv heads. A token's cell is its position plus a shift, the same for all sequences and calls.

    Attributes:
        entries: (B, H, cells, E), keys beside values, in the stored type.
        bounds: (B, H, cells / unit, 2 D), means and variances of the keys of each block; with 8 bits (.., 2 D + unit), with
            the largest coordinate of each value.
        slot: (B, H, cells), the slot that the token was merged into.
        log_share: (B, H, cells), log of the token's share of that slot; -inf for an empty cell.
        blocks: how many blocks each query recalls.
        unit: tokens in a block.
        shift: of a token's cell against its position.
        positions: coordinates of the keys that hold positions (`biases.py`). Fewer than 32 bits would round them, so they are
            told from the cells then.
    """

    entries: Tensor
    bounds: Tensor
    slot: Tensor
    log_share: Tensor
    blocks: int
    unit: int
    shift: int = 0
    positions: int = 0

    @staticmethod
    def empty(like: Tensor, heads: int, dim: int, value_dim: int, kernel: NearFar) -> "FarCache":
        """Of `heads` kv heads, for the batch, dtype and device of `like` (B, ..)."""
        shape, unit, bits = (like.shape[0], heads, 0), kernel.recall_unit, kernel.recall_bits
        dtype = DTYPES.get(bits, like.dtype)
        width, precision = (2 * dim + unit, torch.float16) if bits == 8 else (2 * dim, dtype)
        return FarCache(
            entries=like.new_zeros(*shape, dim + value_dim, dtype=dtype),
            bounds=like.new_zeros(*shape, width, dtype=precision),
            slot=like.new_zeros(shape, dtype=torch.int64),
            log_share=like.new_zeros(shape),
            blocks=0,
            unit=unit,
        )

    @staticmethod
    def dtypes(bits: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Those of far_entries and far_bounds in a state of this dtype."""
        return {"far_entries": DTYPES.get(bits, dtype), "far_bounds": dtype if bits == 32 else torch.float16}

    @property
    def quantized(self) -> bool:
        return self.entries.dtype == torch.int8

    def head(self, h: int) -> "FarCache":
        """One kv head alone."""
        entries, bounds, slot, log_share = (
            x[:, h : h + 1] for x in (self.entries, self.bounds, self.slot, self.log_share)
        )
        return replace(self, entries=entries, bounds=bounds, slot=slot, log_share=log_share)

    def extended(self, arriving: Tensor, cell: Tensor, fresh: Tensor, end: int, dim: int) -> "FarCache":
        """Stores new tokens (B, H, n, E), whole blocks of them, in their cells (B, n), and their bounds.

        fresh: (B, n), which of them are new. end: the number of cells afterwards.
        """
        unit = self.unit
        units = arriving.unflatten(2, (-1, unit))
        alive = fresh.unflatten(1, (-1, unit))  # (B, n / unit, unit)
        bounds = _bounds(units.detach()[..., :dim], alive[:, None, :, :, None])
        if self.quantized:
            if arriving.requires_grad:
                raise ValueError("far tokens stored in 8 bits carry no gradient: train with NearFar(recall_bits=32).")
            units, bounds = _quantize(units, bounds.clamp(-LARGEST_HALF, LARGEST_HALF).half(), dim)
        # Blocks without a new token are written behind the end, and cut off again.
        index = (cell[:, ::unit] // unit).masked_fill(~alive.any(-1), end // unit)
        grown = torch.nn.functional.pad(self.entries, (0, 0, 0, end + unit - self.entries.shape[2]))
        entries = _put_blocks(grown.unflatten(2, (-1, unit)), index, units).flatten(2, 3)[:, :, :end]
        grown = torch.nn.functional.pad(self.bounds, (0, 0, 0, end // unit + 1 - self.bounds.shape[2]))
        return replace(self, entries=entries, bounds=_put_blocks(grown, index, bounds)[:, :, : end // unit])

    def take(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Entries, slots and log-shares of the tokens in the blocks (B, H, u)."""
        entries, slot, log_share = (
            _get_blocks(x.unflatten(2, (-1, self.unit)), index) for x in (self.entries, self.slot, self.log_share)
        )
        entries = _dequantize(entries, _get_blocks(self.bounds, index)) if self.quantized else entries
        entries = entries.flatten(2, 3).to(dtype)
        if self._rounded:
            cell = index.unsqueeze(-1) * self.unit + torch.arange(self.unit, device=index.device)
            self._place(entries, cell.flatten(2), (self.bounds.shape[-1] - (self.unit if self.quantized else 0)) // 2)
        return entries, slot.flatten(2, 3), log_share.flatten(2, 3)

    def bounds_of_keys(self, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Means and variances (B, H, blocks, D) of the keys of each block."""
        mean, var = (x.to(dtype) for x in self.bounds[..., : 2 * dim].split(dim, -1))
        if self._rounded:
            mean = mean.clone()
            first = torch.arange(mean.shape[2], device=mean.device) * self.unit
            self._place(mean, first + (self.unit - 1) / 2, dim)
        return mean, var

    @property
    def _rounded(self) -> bool:
        """True if positions cannot be read from what is stored."""
        return self.positions > 0 and self.entries.dtype in DTYPES.values()

    def _place(self, keys: Tensor, cell: Tensor, dim: int) -> None:
        """Writes the positions of tokens in these cells into their keys (B, H, n, >= dim)."""
        unit = SLOPE_UNIT if self.positions == 1 else TABLE_UNIT
        keys[..., dim - self.positions] = (cell - self.shift).to(keys.dtype) * unit


def _bounds(keys: Tensor, fresh: Tensor) -> Tensor:
    """Means and variances (B, H, u, 2 D) of those keys (B, H, u, unit, D) that are new."""
    count = fresh.sum(3).clamp_min(1)
    mean = (keys * fresh).sum(3) / count
    var = ((keys - mean.unsqueeze(3)).square() * fresh).sum(3) / count
    return torch.cat([mean, var], -1)


def _quantize(units: Tensor, bounds: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """int8 codes (B, H, u, unit, E) by bounds (B, H, u, 2 D) in half precision, and the bounds with the range of each value."""
    mean, radius = _key_scale(bounds, dim, units.shape[3])
    key = (units[..., :dim] - mean) / radius.clamp_min(1e-12)
    top = units[..., dim:].abs().amax(-1).clamp_max(LARGEST_HALF).half()  # (B, H, u, unit)
    value = units[..., dim:] / top.float().clamp_min(1e-12).unsqueeze(-1)
    codes = (LEVELS * torch.cat([key, value], -1)).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    return codes, torch.cat([bounds, top], -1)


def _dequantize(codes: Tensor, bounds: Tensor) -> Tensor:
    unit = codes.shape[3]
    dim = (bounds.shape[-1] - unit) // 2
    mean, radius = _key_scale(bounds, dim, unit)
    key = codes[..., :dim] * (radius / LEVELS) + mean
    return torch.cat([key, codes[..., dim:] * (bounds[..., 2 * dim :].float() / LEVELS).unsqueeze(-1)], -1)


def _key_scale(bounds: Tensor, dim: int, unit: int) -> tuple[Tensor, Tensor]:
    """Mean of the keys of a block, and their largest possible distance from it: (B, H, u, 1, D) both."""
    mean, var = bounds[..., :dim].float(), bounds[..., dim : 2 * dim].float()
    return mean.unsqueeze(3), ((unit - 1) * var).sqrt().unsqueeze(3)


def _get_blocks(x: Tensor, index: Tensor) -> Tensor:
    """(B, H, n, ..) at (B, H, u)."""
    return x.gather(2, index.reshape(*index.shape, *[1] * (x.dim() - 3)).expand(-1, -1, -1, *x.shape[3:]))


def _put_blocks(x: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """(B, H, n, ..) with new blocks (B, H, u, ..) at (B, u)."""
    return x.scatter(2, index.reshape(index.shape[0], 1, -1, *[1] * (x.dim() - 3)).expand_as(new), new.to(x.dtype))
