"""A near/far kernel as the native library takes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from .entry_codes import stored_dtype
from .kernel import NearFar
from .positions import Positions

LOG2E = 1.4426950408889634


class NativeForm(NamedTuple):
    """A kernel as the library takes it.

    Attributes:
        sqrt_scale: multiplies queries and keys.
        budgets: the slots of each kv head.
        logit_cap: 0 for none.
        table: the kernel's position biases (query heads, 2 n + 1), or None.
        band: (query heads, n), those of the distances n - 1 .. 0 less the one of everything farther, in units of log2. The
            softmax cancels what is common to a row, so slots need no bias.
        recalls: the blocks that each kv head recalls.
        recall_unit, recall_bits: tokens in such a block, and how they are stored.
        positions: coordinates of the keys that hold positions.
        state_bits: of the keys and values in a state.
    """

    window: int
    sinks: int
    block: int
    stride: int
    alpha: float
    sqrt_scale: float
    budgets: tuple[int, ...]
    logit_cap: float = 0.0
    table: Tensor | None = None
    band: Tensor | None = None
    recalls: tuple[int, ...] = ()
    recall_unit: int = 1
    recall_bits: int = 32
    positions: int = 0
    state_bits: int = 32

    @property
    def entry_dtype(self) -> torch.dtype:
        """Of the keys and values in a state."""
        return stored_dtype(self.state_bits, torch.float32)

    def has_table(self, table: Tensor | None) -> bool:
        """Whether this form was made for these position biases."""
        if self.table is None or table is None:
            return self.table is table
        return torch.equal(self.table, table.float())

    @classmethod
    def of(cls, kernel: NearFar, scale: float | None, kv_heads: int, dim: int) -> "NativeForm":
        sqrt_scale = kernel.logit_scale(dim, scale) ** 0.5
        table, band = kernel.bias_table(), None
        if table is not None:
            table = table.detach().float().clone()
            band = _band(table)
        return cls(
            kernel.window,
            kernel.sinks,
            kernel.block,
            kernel.stride,
            kernel.alpha,
            sqrt_scale,
            kernel.budgets(kv_heads),
            kernel.logit_cap or 0.0,
            table,
            band,
            kernel.recalls(kv_heads),
            kernel.recall_unit,
            kernel.recall_bits,
            kernel.positions,
            kernel.state_bits,
        )

    def with_gradients(self, kernel: NearFar) -> "NativeForm":
        """With a band that passes gradients on to the kernel's position biases."""
        table = kernel.bias_table()
        return self if table is None else self._replace(band=_band(table.float()))


def _band(table: Tensor) -> Tensor:
    """(query heads, n), of a table (query heads, 2 n + 1)."""
    n = table.shape[1] // 2
    return ((table[:, 1 : n + 1] - table[:, :1]) * LOG2E).contiguous()


def far_enough(positions: Positions, sinks: int, reach: int) -> bool:
    """True if no merged key is nearer to the next token than `reach`; dropped tokens may have brought some so near."""
    return all(m <= sinks or t - m + 1 >= reach for t, m in zip(positions.tokens, positions.merged, strict=True))
