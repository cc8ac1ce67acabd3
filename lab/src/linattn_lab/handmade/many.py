"""Many heads of one shape at once: their weights stacked, sequences of any length padded to one batch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .designs import Design
from .torch_head import TorchHead
from .training import batches

NAMES = ("Km", "Qm", "Vm", "pos", "pos_end")
Stack = dict[str, Tensor]  # by name, (heads, ...); names that a head does not have are left out


def stack(heads: Sequence[TorchHead]) -> Stack:
    """The heads' weights, ready to be learned."""
    return {
        name: torch.stack([getattr(head, name).detach() for head in heads]).requires_grad_()
        for name in NAMES
        if getattr(heads[0], name) is not None
    }


def head_of(weights: Stack, number: int) -> TorchHead:
    """One of them, in float64."""
    parts = [weights[name].detach()[number].double() if name in weights else None for name in NAMES]
    return TorchHead(*parts)  # type: ignore[arg-type]


def padded(design: Design) -> tuple[Tensor, Tensor, Tensor]:
    """All sequences as one batch: tokens (B, n, d_in), expected outputs (B, n, d_v), lengths (B,)."""
    parts = [(tokens, expected) for _, tokens, expected in batches(design)]
    longest = max(tokens.shape[1] for tokens, _ in parts)

    def joined(place: int) -> Tensor:
        return torch.cat([pad(part[place], (0, 0, 0, longest - part[place].shape[1])) for part in parts])

    lengths = torch.cat([torch.full((len(tokens),), tokens.shape[1]) for tokens, _ in parts])
    return joined(0), joined(1), lengths


def errors(weights: Stack, tokens: Tensor, expected: Tensor, lengths: Tensor) -> Tensor:
    """Mean squared error of every head on every sequence, (heads, B).

    Args:
        tokens, expected, lengths: as `padded` gives them, the same for all heads, or with a dimension of heads first.
    """
    longest, width = tokens.shape[-2:]
    places = torch.arange(longest)
    real = places < lengths[..., None]  # (.., B, n)
    from_end = (lengths[..., None] - 1 - places).clamp_min(0)
    each = torch.arange(len(weights["Km"]))[:, None, None]

    def project(matrix: Tensor) -> Tensor:
        rows = tokens.flatten(-3, -2) @ matrix[:, :width]  # one product for each head
        out = rows.unflatten(-2, tokens.shape[-3:-1])
        row = width
        if "pos" in weights:
            end = row + weights["pos"].shape[2]
            out = out + (weights["pos"][:, :longest] @ matrix[:, row:end])[:, None]
            row = end
        if "pos_end" in weights:
            out = out + (weights["pos_end"] @ matrix[:, row:])[each, from_end]
        return out

    query, key, value = (project(weights[name]) for name in ("Qm", "Km", "Vm"))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    output = scores.masked_fill(~real[..., None, :], -math.inf).softmax(-1) @ value
    squares = (output - expected).square().mean(-1) * real
    return squares.sum(-1) / lengths
