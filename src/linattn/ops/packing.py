"""Packed sequences: several sequences end to end in one tensor, brought into a padded batch and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CuSeqlens = Tensor | Sequence[int] | tuple[Tensor, Tensor] | tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Packing:
    """Where each sequence of a packed tensor starts and ends.

    left: padding comes before the tokens of a sequence instead of after them, so that sequences end together.
    """

    bounds: tuple[int, ...]
    left: bool = False

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def pad(self, x: Tensor, *, token_dim: int) -> Tensor:
        """(B, .., T, ..) -> (B * count, .., longest, ..), the sequences of a batch entry one after the other."""
        longest = self.longest
        starts, ends = (torch.tensor(b, device=x.device).unsqueeze(-1) for b in (self.bounds[:-1], self.bounds[1:]))
        first = ends - longest if self.left else starts
        index = first + torch.arange(
            longest, device=x.device
        )  # padding repeats a token of its own sequence; it is masked
        index = torch.minimum(torch.maximum(index, starts), ends - 1).clamp_min(0)
        tokens = x.movedim(token_dim, 1)  # (B, T, ...)
        padded = tokens[:, index.reshape(-1)].reshape(tokens.shape[0] * self.count, longest, *tokens.shape[2:])
        return padded.movedim(1, token_dim)

    def valid(self, batch: int, device: torch.device) -> Tensor:
        """(B * count, longest), True at real tokens."""
        lengths = torch.tensor(self.lengths, device=device).repeat(batch).unsqueeze(-1)
        place = torch.arange(self.longest, device=device)
        return place >= self.longest - lengths if self.left else place < lengths

    def unpad(self, x: Tensor, batch: int, *, token_dim: int) -> Tensor:
        """The inverse of `pad`."""
        tokens = x.movedim(token_dim, 1)  # (B * count, longest, ...)
        flat = tokens[self.valid(batch, x.device)]  # (B * T, ...)
        return flat.reshape(batch, self.bounds[-1], *tokens.shape[2:]).movedim(1, token_dim)


def read_packing(cu_seqlens: CuSeqlens, queries: int, keys: int) -> tuple[Packing, Packing]:
    """Of the queries and of the keys. Where a sequence has more of one than of the other, both are padded on the left:
    causal attention aligns the last query with the last key."""
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 else (cu_seqlens, cu_seqlens)
    if any(isinstance(x, int) for x in pair):
        pair = (cu_seqlens, cu_seqlens)
    query_bounds, key_bounds = _read_bounds(pair[0], queries, "query"), _read_bounds(pair[1], keys, "key")
    if len(query_bounds) != len(key_bounds):
        raise ValueError(
            f"cu_seqlens give {len(query_bounds) - 1} query sequences and {len(key_bounds) - 1} key sequences: "
            "they must be the same sequences."
        )
    left = query_bounds != key_bounds
    return Packing(query_bounds, left), Packing(key_bounds, left)


def _read_bounds(cu_seqlens: object, tokens: int, name: str) -> tuple[int, ...]:
    """Checks boundaries 0 = c_0 <= c_1 <= .. <= c_n = tokens."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ValueError(
                f"cu_seqlens must be a 1-D tensor of whole numbers, got {cu_seqlens.dtype} of {tuple(cu_seqlens.shape)}."
            )
        cu_seqlens = cu_seqlens.tolist()
    if not isinstance(cu_seqlens, Sequence) or not all(isinstance(b, int) for b in cu_seqlens):
        raise TypeError(
            f"cu_seqlens must be a tensor or a list of whole numbers, or a pair of them, got {cu_seqlens!r}."
        )
    bounds = tuple(cu_seqlens)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or list(bounds) != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of {name} tokens, {tokens}; got {list(bounds[:8])}"
            f"{'..' if len(bounds) > 8 else ''}."
        )
    return bounds
