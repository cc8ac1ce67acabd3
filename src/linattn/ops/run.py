"""Shared by the chunked forms: initial states, packed sequences, segments, masked tokens."""

import torch
from torch import Tensor

from . import segments
from .heads import output_heads
from .packed_batches import run_packed
from .segments import Segment


def initial_state(query: Tensor, key: Tensor, value: Tensor, sequences: int) -> Tensor:
    """Zeros (B * sequences, H, D, M), in float64 for float64 tokens and float32 for all others."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = value.shape[0] * sequences, value.shape[1], key.shape[-1], value.shape[-1]
    return torch.zeros(shape, dtype=dtype, device=query.device)


def run_rule(
    segment: Segment,
    pieces: list[Tensor | None],
    mask: Tensor | None,
    cu_seqlens: list[int] | None,
    state: Tensor | None,
    *,
    chunk: int,
    numbers: int,
) -> tuple[Tensor, Tensor]:
    """All tokens of query, key, value and the further pieces (B, heads, T, ..) -> rows (B, Ho, T, M), last states.

    segment: (pieces.., mask (B, 1, T), state) -> (rows, state). numbers: in its temporaries, for each token and state head.
    """
    query, key, value = pieces[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    B, H, T, M = value.shape
    if state is None:
        state = initial_state(query, key, value, 1 if cu_seqlens is None else len(cu_seqlens) - 1)
    if T == 0 or B == 0:
        return query.new_zeros(B, output_heads(query, value), T, M), state.clone()

    def run(pieces: list[Tensor | None], mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        first = pieces[2]
        assert first is not None
        cuts = segments.lengths(first.shape[2], first.shape[0] * H * numbers, chunk)
        return segments.run(segment, [*pieces, None if mask is None else mask.unsqueeze(1)], state, cuts)

    if cu_seqlens is None:
        return run(pieces, mask, state)
    return run_packed(run, pieces, mask, state, cu_seqlens)


def hide(mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Zeros in place of masked tokens: mask (B, 1, T), tokens (B, heads, T) or (B, heads, T, dim)."""
    if mask is None:
        return tokens
    return tokens.masked_fill(~mask.unsqueeze(-1) if tokens.dim() == 4 else ~mask, 0)
