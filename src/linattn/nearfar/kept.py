"""What heads with recall keep of their far tokens, in 32, 16 or 8 bits.

Tokens lie in blocks of a few, and a block keeps the mean and the variance of its keys. In 8 bits these are also what its
keys are written by: no key of n is farther from their mean than sqrt(n - 1) standard deviations. Values are written by
their largest coordinate, one number for each token, beside the bounds.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

STEPS = 127  # of 8 bits to each side of 0
DTYPES = {16: torch.float16, 8: torch.int8}


@dataclass
class Kept:
    """The far tokens of some kv heads. A token's cell is its position plus a shift, the same for all rows and calls.

    Attributes:
        entries: (B, H, cells, E), in the type that they are kept in.
        bounds: (B, H, cells / unit, 2 D), means and variances of the keys of each block; with 8 bits (.., 2 D + unit), the
            largest coordinate of each value too.
        place: (B, H, cells), the slot that a token went into.
        share: (B, H, cells), log of its share there; -inf for a cell that holds no far token.
        blocks, unit: how many blocks are recalled, and the tokens in each.
    """

    entries: Tensor
    bounds: Tensor
    place: Tensor
    share: Tensor
    blocks: int
    unit: int

    @staticmethod
    def empty(like: Tensor, heads: int, dim: int, value_dim: int, blocks: int, unit: int, bits: int) -> "Kept":
        shape, dtype = (like.shape[0], heads, 0), DTYPES.get(bits, like.dtype)
        width, precision = (2 * dim + unit, torch.float16) if bits == 8 else (2 * dim, dtype)
        return Kept(
            entries=like.new_zeros(*shape, dim + value_dim, dtype=dtype),
            bounds=like.new_zeros(*shape, width, dtype=precision),
            place=like.new_zeros(shape, dtype=torch.int64),
            share=like.new_zeros(shape),
            blocks=blocks,
            unit=unit,
        )

    @property
    def packed(self) -> bool:
        return self.entries.dtype == torch.int8

    def head(self, h: int) -> "Kept":
        """Of one kv head alone."""
        entries, bounds, place, share = (x[:, h : h + 1] for x in (self.entries, self.bounds, self.place, self.share))
        return replace(self, entries=entries, bounds=bounds, place=place, share=share)

    def extended(self, arriving: Tensor, cell: Tensor, fresh: Tensor, end: int, dim: int) -> "Kept":
        """With new tokens (B, H, n, E) in their cells (B, n), of which whole blocks come at once, and their bounds."""
        unit = self.unit
        units = arriving.unflatten(2, (-1, unit))
        alive = fresh.unflatten(1, (-1, unit))  # (B, n / unit, unit)
        bounds = _bounds(units.detach()[..., :dim], alive[:, None, :, :, None])
        if self.packed:
            if arriving.requires_grad:
                raise ValueError(
                    "tokens that are kept in 8 bits carry no gradient: train with NearFar(recall_bits=32)."
                )
            units, bounds = _pack(units, bounds.clamp(-65504, 65504).half(), dim)
        index = (cell[:, ::unit] // unit).masked_fill(~alive.any(-1), end // unit)  # the others are cut off again
        grown = torch.nn.functional.pad(self.entries, (0, 0, 0, end + unit - self.entries.shape[2]))
        entries = _put(grown.unflatten(2, (-1, unit)), index, units).flatten(2, 3)[:, :, :end]
        grown = torch.nn.functional.pad(self.bounds, (0, 0, 0, end // unit + 1 - self.bounds.shape[2]))
        return replace(self, entries=entries, bounds=_put(grown, index, bounds)[:, :, : end // unit])

    def take(self, index: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Entries, places and shares of the blocks (B, H, u), one after the other."""
        entries, place, share = (
            _get(x.unflatten(2, (-1, self.unit)), index) for x in (self.entries, self.place, self.share)
        )
        entries = _unpack(entries, _get(self.bounds, index)) if self.packed else entries
        return entries.flatten(2, 3).to(like.dtype), place.flatten(2, 3), share.flatten(2, 3)


def _bounds(keys: Tensor, alive: Tensor) -> Tensor:
    """Means and variances (B, H, u, 2 D) of those keys (B, H, u, unit, D) that are alive."""
    count = alive.sum(3).clamp_min(1)
    mean = (keys * alive).sum(3) / count
    var = ((keys - mean.unsqueeze(3)).square() * alive).sum(3) / count
    return torch.cat([mean, var], -1)


def _pack(units: Tensor, bounds: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """8 bits (B, H, u, unit, E) by bounds (B, H, u, 2 D) in half precision, and the bounds with what values are written by."""
    mean, radius = _key_scale(bounds, dim, units.shape[3])
    key = (units[..., :dim] - mean) / radius.clamp_min(1e-12)
    top = units[..., dim:].abs().amax(-1).clamp_max(65504).half()  # (B, H, u, unit)
    value = units[..., dim:] / top.float().clamp_min(1e-12).unsqueeze(-1)
    codes = (STEPS * torch.cat([key, value], -1)).round().clamp(-STEPS, STEPS).to(torch.int8)
    return codes, torch.cat([bounds, top], -1)


def _unpack(codes: Tensor, bounds: Tensor) -> Tensor:
    unit = codes.shape[3]
    dim = (bounds.shape[-1] - unit) // 2
    mean, radius = _key_scale(bounds, dim, unit)
    key = codes[..., :dim] * (radius / STEPS) + mean
    return torch.cat([key, codes[..., dim:] * (bounds[..., 2 * dim :].float() / STEPS).unsqueeze(-1)], -1)


def _key_scale(bounds: Tensor, dim: int, unit: int) -> tuple[Tensor, Tensor]:
    """Mean of the keys of a block, and how far from it they may be: (B, H, u, 1, D) both."""
    mean, var = bounds[..., :dim].float(), bounds[..., dim : 2 * dim].float()
    return mean.unsqueeze(3), ((unit - 1) * var).sqrt().unsqueeze(3)


def _get(x: Tensor, index: Tensor) -> Tensor:
    """(B, H, n, ..) at (B, H, u)."""
    return x.gather(2, index.reshape(*index.shape, *[1] * (x.dim() - 3)).expand(-1, -1, -1, *x.shape[3:]))


def _put(x: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """(B, H, n, ..) with new ones (B, H, u, ..) at (B, u)."""
    return x.scatter(2, index.reshape(index.shape[0], 1, -1, *[1] * (x.dim() - 3)).expand_as(new), new.to(x.dtype))
