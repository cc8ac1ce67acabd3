"""Runs a rule over a long sequence segment by segment, in memory linear in the tokens.

A segment is a function (pieces.., state) -> (rows, state). Pieces and rows have their tokens in dimension 2. Only the states
between segments are kept for the backward pass, which computes the rest again; a backward pass that is itself
differentiated, and torch.compile, use torch's checkpoint for that; under torch.func transforms everything is kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BUDGET = 2**22  # numbers in the temporaries of a segment: 16 MiB of float32
COMPILED_BUDGET = 2**25  # torch.compile unrolls the loop over segments, so it gets fewer of them

Segment = Callable[..., tuple[Tensor, Tensor]]
Pieces = Sequence[Tensor | None]


def lengths(tokens: int, per_token: int, chunk: int) -> list[int]:
    """Of the segments: multiples of a chunk within the budget, and what is left over at the end."""
    budget = COMPILED_BUDGET if torch.compiler.is_compiling() else BUDGET
    longest = max(1, budget // max(1, per_token * chunk)) * chunk
    return [longest] * (tokens // longest) + [n for n in (tokens % longest,) if n]


def run(segment: Segment, pieces: Pieces, state: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """All segments in order: the rows of all tokens, and the last state."""
    if len(cuts) == 1:
        return segment(*pieces, state)
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._are_functorch_transforms_active():
        return _loop(segment, cuts, pieces, state)
    inputs = [x for x in pieces if x is not None]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state))):
        return _loop(segment, cuts, pieces, state)
    if compiling:
        return _loop(_checkpointed(segment), cuts, pieces, state)
    found: tuple[Tensor, Tensor] = _Segments.apply(segment, cuts, [x is not None for x in pieces], state, *inputs)
    return found


def _checkpointed(segment: Segment) -> Segment:
    return lambda *args: checkpoint(segment, *args, use_reentrant=False, preserve_rng_state=False)


def _loop(
    segment: Segment, cuts: list[int], pieces: Pieces, state: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    split = [[None] * len(cuts) if x is None else x.split(cuts, 2) for x in pieces]
    rows = []
    for i, cut in enumerate(zip(*split, strict=True)):
        if kept is not None:
            kept[i].copy_(state)
        part, state = segment(*cut, state)
        rows.append(part)
    return torch.cat(rows, 2), state


class _Segments(torch.autograd.Function):
    """All segments as one node of autograd, which keeps the inputs and the states between segments."""

    @staticmethod
    def forward(
        ctx: Any, segment: Segment, cuts: list[int], present: list[bool], state: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = state.new_empty(len(cuts), *state.shape)
        out, last = _loop(segment, cuts, _fill(present, inputs), state, kept)
        ctx.segment, ctx.cuts, ctx.present = segment, cuts, present
        ctx.save_for_backward(kept, state, *inputs)
        return out, last

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_state: Tensor) -> Any:
        kept, state, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, None, *_twice_differentiable(ctx, state, inputs, grad_rows, grad_state)
        wanted = ctx.needs_input_grad[4:]
        grads = [torch.empty_like(x) if want else None for x, want in zip(inputs, wanted, strict=True)]
        end = sum(ctx.cuts)
        for i in reversed(range(len(ctx.cuts))):
            length = ctx.cuts[i]
            end -= length
            with torch.enable_grad():
                cut = [
                    x.narrow(2, end, length).detach().requires_grad_(want)
                    for x, want in zip(inputs, wanted, strict=True)
                ]
                before = kept[i].detach().requires_grad_()
                results = ctx.segment(*_fill(ctx.present, cut), before)
            sources = [x for x in (*cut, before) if x.requires_grad]
            *found, grad_state = torch.autograd.grad(
                results, sources, (grad_rows.narrow(2, end, length), grad_state), materialize_grads=True
            )
            for grad, piece in zip((g for g in grads if g is not None), found, strict=True):
                grad.narrow(2, end, length).copy_(piece)
        return None, None, None, grad_state, *grads


def _fill(present: list[bool], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    filled = iter(inputs)
    return [next(filled) if there else None for there in present]


def _twice_differentiable(
    ctx: Any, state: Tensor, inputs: list[Tensor], grad_rows: Tensor, grad_state: Tensor
) -> list[Tensor | None]:
    """The same gradients as a graph that can be differentiated again, at the cost of one more forward pass."""
    results = _loop(_checkpointed(ctx.segment), ctx.cuts, _fill(ctx.present, inputs), state)
    sources = [x for x in (state, *inputs) if x.requires_grad]
    pairs = [(x, g) for x, g in zip(results, (grad_rows, grad_state), strict=True) if x.requires_grad]
    found = iter(
        torch.autograd.grad(
            [x for x, _ in pairs], sources, [g for _, g in pairs], create_graph=True, materialize_grads=True
        )
    )
    return [next(found) if x.requires_grad else None for x in (state, *inputs)]
