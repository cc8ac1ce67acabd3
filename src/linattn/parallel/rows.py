"""The rows of groups of heads, joined."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..engines.native import output_pool


class Rows:
    """Collects the rows of groups of heads. Without gradients each group writes into one tensor, so that nothing is copied.

    dim: of the heads, counted from the end.
    """

    def __init__(self, dim: int, groups: int):
        self.dim, self.groups = dim, groups
        self.kept: list[Tensor] = []
        self.out: Tensor | None = None
        self.at = self.width = 0

    def place(self) -> AbstractContextManager[None]:
        """A context for the next group: the native engine writes its rows where they belong, if it can."""
        if self.out is None or self.at >= self.out.shape[self.dim]:
            return nullcontext()
        target = self.out.narrow(self.dim, self.at, self.width)
        if not target.is_contiguous() or target.dtype is not torch.float32 or not target.is_cpu:
            return nullcontext()
        return output_pool.placed(target)

    def add(self, rows: Tensor) -> None:
        if self.groups == 1 or rows.requires_grad:
            self.kept.append(rows)
            return
        if self.out is None:
            shape = list(rows.shape)
            shape[self.dim] *= self.groups
            pooled = rows.dtype is torch.float32 and rows.is_cpu and rows.dim() <= 4
            self.out = output_pool.empty(*shape) if pooled else rows.new_empty(shape)
            self.width = rows.shape[self.dim]
        target = self.out.narrow(self.dim, self.at, self.width)
        if target.data_ptr() != rows.data_ptr() or not rows.numel():
            target.copy_(rows)
        self.at += self.width

    def joined(self) -> Tensor:
        if self.out is not None:
            return self.out
        return self.kept[0] if len(self.kept) == 1 else torch.cat(self.kept, self.dim)
