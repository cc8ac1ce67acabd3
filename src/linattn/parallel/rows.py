"""Groups of heads: their inputs, and their rows joined, without a second copy of either.

Rows of all groups are written into one tensor, and the gradients of their inputs as well: torch's own split and cat would hold
everything twice for a while, which is what memory per process is about.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engines.native import output_pool
from .exchange import tie


def split(x: Tensor, groups: int, dim: int) -> list[Tensor]:
    """Equal parts along a dimension."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return list(x.chunk(groups, dim))
    gradient = _Gradient(groups)
    return [_Part.apply(x, gradient, i, dim) for i in range(groups)]


class _Gradient:
    """The gradient of a tensor, filled part by part."""

    def __init__(self, groups: int):
        self.groups, self.left = groups, groups
        self.whole: Tensor | None = None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: _Gradient, i: int, dim: int) -> Tensor:
        ctx.call, ctx.shape = (gradient, i, dim), x.shape
        width = x.shape[dim] // gradient.groups
        return x.narrow(dim, i * width, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradient, i, dim = ctx.call
        if gradient.whole is None:
            gradient.whole = grad.new_empty(ctx.shape)
        width = grad.shape[dim]
        gradient.whole.narrow(dim, i * width, width).copy_(grad)
        gradient.left -= 1
        if gradient.left:
            return None, None, None, None
        whole, gradient.whole, gradient.left = gradient.whole, None, gradient.groups
        return whole, None, None, None


class Rows:
    """Collects the rows of groups of heads in one tensor; the native engine writes them there itself.

    dim: of the heads, counted from the end. shape: of the rows of all heads. like: a tensor of their dtype and device.
    """

    def __init__(self, dim: int, groups: int, shape: tuple[int, ...], like: Tensor):
        self.dim, self.groups = dim, groups
        self.parts: dict[int, Tensor] = {}
        self.out: Tensor | None = None
        if groups > 1:
            pooled = like.dtype is torch.float32 and like.is_cpu and len(shape) <= 4
            self.out = output_pool.empty(*shape) if pooled else like.new_empty(shape)

    def place(self, i: int) -> AbstractContextManager[None]:
        """A context for group i, whose rows then need not be copied, if they are contiguous in the whole."""
        if self.out is None:
            return nullcontext()
        target = self._target(i)
        if not target.is_contiguous() or target.dtype is not torch.float32 or not target.is_cpu:
            return nullcontext()
        # No view as autograd understands it, but a tensor on the same memory.
        alone = torch.empty(0).set_(target.untyped_storage(), target.storage_offset(), target.shape, target.stride())
        return output_pool.placed(alone)

    def _target(self, i: int) -> Tensor:
        assert self.out is not None
        width = self.out.shape[self.dim] // self.groups
        return self.out.narrow(self.dim, i * width, width)

    def add(self, i: int, rows: Tensor) -> None:
        if self.out is not None:
            target = self._target(i)
            assert target.shape == rows.shape
            if rows.numel() and target.data_ptr() != rows.data_ptr():
                target.copy_(rows.detach())
        self.parts[i] = rows

    def tie(self, i: int, token: Tensor | None) -> None:
        """The backward pass of group i also runs the exchange that gave the token."""
        self.parts[i] = tie(self.parts[i], token)

    def joined(self) -> Tensor:
        if self.out is None:
            return self.parts[0]
        parts = [self.parts[i] for i in range(self.groups)]
        if not any(x.requires_grad for x in parts):
            return self.out
        whole: Tensor = _Join.apply(self.out, self.dim, *parts)
        return whole


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.groups = dim, len(parts)
        ctx.mark_dirty(out)  # it holds the parts already
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *grad.chunk(ctx.groups, ctx.dim)
