"""Runs a long sequence in stretches, so that features of only one stretch exist at a time, in training too.

A stretch is a function (pieces.., sums, level) -> (rows, guarded, sums, level): its share of the tokens in, its rows out, and
the sums handed on to the next one. Three ways to differentiate through many of them:

- kernels whose only weights are their parameters: `_Sweep` keeps the sums between stretches and computes everything else
  again in the backward pass, writing rows and gradients in place into tensors allocated once;
- kernels that may use any tensor (a user's function), and torch.compile: torch's own checkpoint;
- torch.func transforms, which know no checkpoints: nothing is saved by recomputing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ..kernels.base import Kernel

BUDGET = 2**20  # numbers in the features of a stretch: 4 MiB of float32, which a cache can hold
COMPILED_BUDGET = 2**25  # torch.compile unrolls the loop over stretches, so it gets fewer of them

Stretch = Callable[..., tuple[Tensor | None, Tensor | None, Tensor, Tensor]]


def run(
    stretch: Stretch,
    kernel: Kernel,
    pieces: Sequence[Tensor | None],
    sums: Tensor,
    level: Tensor,
    *,
    rows: tuple[int, ...] | None,
    multiple: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """All stretches in order. `pieces` are (B, H, T, D), (B, H, T) or (B, T); rows is the shape of the whole output."""
    first = pieces[0]
    assert first is not None
    lengths = _lengths(first, kernel, multiple, least=4 * sums.shape[-1])
    inputs = [x for x in pieces if x is not None]
    wanted = torch.is_grad_enabled() and len(lengths) > 1
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and torch._C._are_functorch_transforms_active()
    if wanted and not compiling and not transformed and kernel.only_parameters:
        parameters = [p for p in kernel.parameters() if p.requires_grad]
        if any(x.requires_grad for x in (*inputs, *parameters, sums)):
            return _Sweep.apply(stretch, lengths, rows, pieces, level, sums, *inputs, *parameters)
    if wanted and not transformed:
        plain = stretch
        stretch = lambda *args: checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False)  # noqa: E731
    return _loop(stretch, lengths, rows, pieces, sums, level, keep=None, in_place=not wanted and not transformed)


def _loop(
    stretch: Stretch,
    lengths: list[int],
    rows: tuple[int, ...] | None,
    pieces: Sequence[Tensor | None],
    sums: Tensor,
    level: Tensor,
    *,
    keep: Tensor | None,
    in_place: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """The stretches one after the other; `keep` takes the sums and `in_place` the rows, to leave the heap unfragmented."""
    out: Tensor | None = None
    parts, guarded = [], None
    in_place = in_place and not torch.compiler.is_compiling() and not torch.is_grad_enabled() and len(lengths) > 1
    if in_place and rows is not None:
        out = sums.new_empty(rows)
    start = 0
    for i, (length, cut) in enumerate(zip(lengths, _cuts(lengths, pieces))):
        if keep is not None:
            sums = keep[i].copy_(sums)
        part, small, sums, level = stretch(*cut, sums, level)
        if small is not None:
            guarded = small if guarded is None else guarded + small
        if part is not None and out is not None:
            out[:, :, start : start + length] = part
        elif part is not None:
            parts.append(part)
        start += length
    if rows is not None and out is None:
        out = torch.cat(parts, 2) if len(parts) > 1 else parts[0] if parts else sums.new_zeros(rows)
    return out, guarded, sums, level


class _Sweep(torch.autograd.Function):
    """All stretches as one step of autograd, whose memory is the inputs, the rows and the sums between stretches."""

    @staticmethod
    def forward(
        ctx: Any,
        stretch: Stretch,
        lengths: list[int],
        rows: tuple[int, ...] | None,
        pieces: Sequence[Tensor | None],
        level: Tensor,
        sums: Tensor,
        *tensors: Tensor,
    ) -> Any:
        kept = sums.new_empty(len(lengths), *sums.shape)
        levels: list[Tensor] = []

        def noting(*args: Any) -> Any:
            levels.append(args[-1])
            return stretch(*args)

        out, guarded, sums, level = _loop(noting, lengths, rows, pieces, sums, level, keep=kept, in_place=True)
        ctx.stretch, ctx.lengths, ctx.levels = stretch, lengths, levels
        ctx.present = [x is not None for x in pieces]
        ctx.save_for_backward(kept, *tensors)
        ctx.mark_non_differentiable(*[x for x in (guarded, level) if x is not None])
        return out, guarded, sums, level

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor | None, _: Any, grad_sums: Tensor, __: Any) -> Any:
        kept, *tensors = ctx.saved_tensors
        count = sum(ctx.present)
        inputs, parameters = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[6 : 6 + count]
        grads = [torch.empty_like(x) if want else None for x, want in zip(inputs, wanted)]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        starts = [sum(ctx.lengths[:i]) for i in range(len(ctx.lengths))]
        for i in reversed(range(len(ctx.lengths))):
            start, length = starts[i], ctx.lengths[i]
            with torch.enable_grad():
                cut = [_narrow(x, start, length).detach().requires_grad_(want) for x, want in zip(inputs, wanted)]
                sums = kept[i].detach().requires_grad_()
                filled = iter(cut)
                pieces = [next(filled) if present else None for present in ctx.present]
                part, _small, new_sums, _level = ctx.stretch(*pieces, sums, ctx.levels[i])
            outputs, grad_outputs = [], []
            if part is not None and grad_rows is not None:
                outputs, grad_outputs = [part], [grad_rows[:, :, start : start + length]]
            passed_on = new_sums is sums
            if not passed_on and new_sums.requires_grad:
                outputs, grad_outputs = [*outputs, new_sums], [*grad_outputs, grad_sums]
            sources = [x for x in (*cut, sums, *parameters) if x.requires_grad]
            found = iter(torch.autograd.grad(outputs, sources, grad_outputs, allow_unused=True))
            for grad in grads:
                if grad is not None:
                    piece_grad = next(found)
                    target = _narrow(grad, start, length)
                    target.zero_() if piece_grad is None else target.copy_(piece_grad)
            piece_grad = next(found)
            step = torch.zeros_like(sums) if piece_grad is None else piece_grad
            grad_sums = grad_sums + step if passed_on else step
            for total in parameter_grads:
                piece_grad = next(found)
                if piece_grad is not None:
                    total.add_(piece_grad)
        return (None, None, None, None, None, grad_sums, *grads, *parameter_grads)


def _lengths(x: Tensor, kernel: Kernel, multiple: int, least: int) -> list[int]:
    """Stretches of as many tokens as the budget allows, in multiples of a chunk, and what is left over at the end.

    Never fewer than `least`, a few times the value dim: below that, touching the sums costs more than the tokens do.
    """
    tokens = x.shape[-2]
    per_token = max(1, x.shape[0] * x.shape[1] * kernel.features_of(x))
    budget = COMPILED_BUDGET if torch.compiler.is_compiling() else BUDGET
    longest = max(1, max(least, budget // per_token) // multiple) * multiple
    whole = tokens - tokens % multiple
    lengths = [longest] * (whole // longest)
    return lengths + [n for n in (whole % longest, tokens - whole) if n]


def _cuts(lengths: list[int], pieces: Sequence[Tensor | None]) -> Any:
    """Every piece split along its tokens."""
    split: list[Any] = []
    for x in pieces:
        split.append([None] * len(lengths) if x is None else x.split(lengths, _token_dim(x)))
    return zip(*split)


def _narrow(x: Tensor, start: int, length: int) -> Tensor:
    return x.narrow(_token_dim(x), start, length)


def _token_dim(x: Tensor) -> int:
    return x.dim() - 2 if x.dim() == 4 else x.dim() - 1
