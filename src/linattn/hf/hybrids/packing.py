"""Where packed sequences begin: from the arguments that transformers' models are given for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...functional import routing

ONE_ROW = "pack the sequences into one row (batch 1), as DataCollatorWithFlattening does."


def packed_bounds(
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    tokens: int | None = None,
) -> list[int] | None:
    """Bounds 0 = c_0 < c_1 .. < c_n = tokens of n sequences; None for tokens of one sequence.

    seq_idx: (batch, tokens), the number of each token's sequence; the rows must agree. cu_seqlens: the bounds themselves.
    """
    if cu_seqlens is not None:
        bounds = [int(x) for x in cu_seqlens]
        if tokens is not None and (bounds[:1] != [0] or bounds[-1] != tokens or bounds != sorted(bounds)):
            raise ValueError(f"cu_seqlens must rise from 0 to the {tokens} tokens of the row, got {bounds}; {ONE_ROW}")
        bounds = sorted(set(bounds))
    elif seq_idx is not None:
        if seq_idx.dim() != 2 or (tokens is not None and seq_idx.shape[1] != tokens):
            raise ValueError(f"seq_idx must be (batch, tokens) with {tokens} tokens, got {tuple(seq_idx.shape)}.")
        if not bool((seq_idx == seq_idx[:1]).all()):
            raise ValueError(f"the rows of seq_idx must have the same sequences; {ONE_ROW}")
        starts = torch.nonzero(seq_idx[0].diff()).flatten() + 1
        bounds = [0, *starts.tolist(), seq_idx.shape[1]]
    else:
        return None
    if len(bounds) <= 2:
        return None
    if routing.current() is not None:
        raise ValueError("packed sequences of a transformers model have no form over shards: pad them.")
    return bounds
