"""Runs a long sequence in segments, so that features of only one segment exist at a time, in training too.

A segment is a function (pieces.., sums, log_scale) -> (rows, guarded, sums, log_scale): its share of the tokens in, its rows
out, and the sums handed on to the next one. Three ways to differentiate through many of them:

- kernels whose only weights are their parameters: `_Segments` keeps the sums between segments and computes everything else
  again in the backward pass, writing rows and gradients in place into tensors allocated once; a backward pass that is
  itself differentiated goes through torch's checkpoint;
- kernels that may use any tensor (a user's function), and torch.compile: torch's own checkpoint;
- torch.func transforms, which know no checkpoints: nothing is saved by recomputing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..kernels.base import Kernel, compute_dtype

BUDGET = 2**20  # numbers in the features of a segment: 4 MiB of float32, which a cache can hold
COMPILED_BUDGET = 2**25  # torch.compile unrolls the loop over segments, so it gets fewer of them

Segment = Callable[..., tuple[Tensor | None, Tensor | None, Tensor, Tensor]]


def run(
    segment: Segment,
    kernel: Kernel,
    pieces: Sequence[Tensor | None],
    sums: Tensor,
    log_scale: Tensor,
    *,
    rows: tuple[int, ...] | None,
    multiple: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """All segments in order. `pieces` are (B, H, T, D), (B, H, T) or (B, T); rows is the shape of the whole output."""
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
            return _Segments.apply(segment, lengths, rows, pieces, log_scale, sums, *inputs, *parameters)
    if wanted and not transformed:
        segment = _checkpointed(segment)
    return _loop(segment, lengths, rows, pieces, sums, log_scale, keep=None, in_place=not wanted and not transformed)


def _checkpointed(segment: Segment) -> Segment:
    return lambda *args: checkpoint(segment, *args, use_reentrant=False, preserve_rng_state=False)


def _loop(
    segment: Segment,
    lengths: list[int],
    rows: tuple[int, ...] | None,
    pieces: Sequence[Tensor | None],
    sums: Tensor,
    log_scale: Tensor,
    *,
    keep: Tensor | None,
    in_place: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """The segments one after the other; `keep` takes the sums and `in_place` the rows, to leave the heap unfragmented."""
    out: Tensor | None = None
    dtype = _row_dtype(pieces)
    parts, guarded = [], None
    in_place = in_place and not torch.compiler.is_compiling() and not torch.is_grad_enabled() and len(lengths) > 1
    if in_place and rows is not None:
        out = sums.new_empty(rows, dtype=dtype)
    start = 0
    for i, (length, cut) in enumerate(zip(lengths, _cuts(lengths, pieces), strict=False)):
        if keep is not None:
            keep[i].copy_(sums)
        part, small, sums, log_scale = segment(*cut, sums, log_scale)
        if small is not None:
            guarded = small if guarded is None else guarded + small
        if part is not None and out is not None:
            out[:, :, start : start + length] = part
        elif part is not None:
            parts.append(part)
        start += length
    if rows is not None and out is None:
        out = torch.cat(parts, 2) if len(parts) > 1 else parts[0] if parts else sums.new_zeros(rows, dtype=dtype)
    return out, guarded, sums, log_scale


class _Segments(torch.autograd.Function):
    """All segments as one step of autograd, whose memory is the inputs, the rows and the sums between segments."""

    @staticmethod
    def forward(
        ctx: Any,
        segment: Segment,
        lengths: list[int],
        rows: tuple[int, ...] | None,
        pieces: Sequence[Tensor | None],
        log_scale: Tensor,
        sums: Tensor,
        *tensors: Tensor,
    ) -> Any:
        kept, first = sums.new_empty(len(lengths), *sums.shape, dtype=_row_dtype(pieces)), sums
        log_scales: list[Tensor] = []

        def noting(*args: Any) -> Any:
            log_scales.append(args[-1])
            return segment(*args)

        out, guarded, sums, log_scale = _loop(noting, lengths, rows, pieces, sums, log_scale, keep=kept, in_place=True)
        ctx.segment, ctx.lengths, ctx.log_scales, ctx.rows = segment, lengths, log_scales, rows
        ctx.present = [x is not None for x in pieces]
        ctx.save_for_backward(kept, first, *tensors)
        ctx.mark_non_differentiable(*[x for x in (guarded, log_scale) if x is not None])
        return out, guarded, sums, log_scale

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor | None, _: Any, grad_sums: Tensor, __: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return _Segments._differentiable_backward(ctx, grad_rows, grad_sums)
        kept, first, *tensors = ctx.saved_tensors
        count = sum(ctx.present)
        inputs, parameters = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[6 : 6 + count]
        grads = [torch.empty_like(x) if want else None for x, want in zip(inputs, wanted, strict=False)]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        starts = [sum(ctx.lengths[:i]) for i in range(len(ctx.lengths))]
        for i in reversed(range(len(ctx.lengths))):
            start, length = starts[i], ctx.lengths[i]
            with torch.enable_grad():
                cut = [
                    _narrow(x, start, length).detach().requires_grad_(want)
                    for x, want in zip(inputs, wanted, strict=False)
                ]
                sums = kept[i].detach().to(first.dtype).requires_grad_()
                filled = iter(cut)
                pieces = [next(filled) if present else None for present in ctx.present]
                part, _small, new_sums, _log_scale = ctx.segment(*pieces, sums, ctx.log_scales[i])
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

    @staticmethod
    def _differentiable_backward(ctx: Any, grad_rows: Tensor | None, grad_sums: Tensor) -> Any:
        """The same gradients as a graph that can be differentiated again, at the cost of one more forward pass."""
        _kept, sums, *tensors = ctx.saved_tensors
        filled = iter(tensors)
        pieces = [next(filled) if present else None for present in ctx.present]
        segment = _checkpointed(ctx.segment)
        out, _, new_sums, _ = _loop(
            segment, ctx.lengths, ctx.rows, pieces, sums, ctx.log_scales[0], keep=None, in_place=False
        )
        results = [(x, g) for x, g in ((out, grad_rows), (new_sums, grad_sums)) if x is not None and g is not None]
        results = [(x, g) for x, g in results if x.requires_grad]
        wanted = [i for i, x in enumerate((sums, *tensors)) if x.requires_grad]
        sources = [(sums, *tensors)[i] for i in wanted]
        outputs, grad_outputs = [x for x, _ in results], [g for _, g in results]
        found = torch.autograd.grad(outputs, sources, grad_outputs, create_graph=True, allow_unused=True)
        grads: list[Tensor | None] = [None] * (len(tensors) + 1)
        for i, grad in zip(wanted, found, strict=False):
            grads[i] = grad
        return (None, None, None, None, None, *grads)


def _lengths(x: Tensor, kernel: Kernel, multiple: int, least: int) -> list[int]:
    """Segmentes of as many tokens as the budget allows, in multiples of a chunk, and what is left over at the end.

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
    return zip(*split, strict=False)


def _row_dtype(pieces: Sequence[Tensor | None]) -> torch.dtype:
    first = pieces[0]
    assert first is not None
    return compute_dtype(first.dtype)


def _narrow(x: Tensor, start: int, length: int) -> Tensor:
    return x.narrow(_token_dim(x), start, length)


def _token_dim(x: Tensor) -> int:
    return x.dim() - 2 if x.dim() == 4 else x.dim() - 1
