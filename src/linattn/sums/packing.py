"""Packed sequences: several sequences end to end in one tensor, brought into a padded batch and back."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Packing:
    """Where each sequence of a packed tensor starts and ends."""

    bounds: list[int]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.bounds, self.bounds[1:])]

    def pad(self, x: Tensor, *, token_dim: int) -> Tensor:
        """(B, .., T, ..) -> (B * count, .., longest, ..), the sequences of a batch entry one after the other."""
        longest = max(self.lengths, default=0)
        if longest == 0:
            index = torch.zeros(self.count, 0, dtype=torch.long, device=x.device)
        else:
            steps = torch.arange(longest, device=x.device)
            starts = torch.tensor(self.bounds[:-1], device=x.device).unsqueeze(-1)
            ends = torch.tensor(self.bounds[1:], device=x.device).unsqueeze(-1)
            index = torch.minimum(starts + steps, (ends - 1).clamp_min(0))  # padding repeats a token; it is masked
        tokens = x.movedim(token_dim, 1)  # (B, T, ...)
        padded = tokens[:, index.reshape(-1)].reshape(tokens.shape[0] * self.count, longest, *tokens.shape[2:])
        return padded.movedim(1, token_dim)

    def valid(self, batch: int, device: torch.device) -> Tensor:
        """(B * count, longest), True at real tokens."""
        lengths = torch.tensor(self.lengths, device=device).repeat(batch)
        return torch.arange(max(self.lengths, default=0), device=device) < lengths.unsqueeze(-1)

    def unpad(self, x: Tensor, batch: int, *, token_dim: int) -> Tensor:
        """The inverse of `pad`."""
        tokens = x.movedim(token_dim, 1)  # (B * count, longest, ...)
        flat = tokens[self.valid(batch, x.device)]  # (B * T, ...)
        return flat.reshape(batch, self.bounds[-1], *tokens.shape[2:]).movedim(1, token_dim)


def read_cu_seqlens(cu_seqlens: object, tokens: int, name: str) -> Packing:
    """Checks boundaries 0 = c_0 <= c_1 <= .. <= c_n = tokens."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
            raise ValueError(
                f"cu_seqlens must be a 1-D tensor of whole numbers, got {cu_seqlens.dtype} of {tuple(cu_seqlens.shape)}."
            )
        cu_seqlens = cu_seqlens.tolist()
    bounds = [int(b) for b in cu_seqlens]  # type: ignore[attr-defined]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of {name} tokens, {tokens}; got {bounds[:8]}"
            f"{'..' if len(bounds) > 8 else ''}."
        )
    return Packing(bounds)
