"""Packed sequences for the chunked torch forms: sequences of similar length become the rows of one padded batch."""

from collections.abc import Callable

import torch
from torch import Tensor

Run = Callable[[list[Tensor | None], Tensor | None, Tensor], tuple[Tensor, Tensor]]


def run_packed(
    run: Run, pieces: list[Tensor | None], mask: Tensor | None, state: Tensor, bounds: list[int]
) -> tuple[Tensor, Tensor]:
    """Applies `run` (pieces, mask, state) to every sequence of a packed batch.

    pieces (B, heads, T, ..), mask (B, T), state (B * n, H, D, M). Sequences share a padded batch with those of up to twice
    their length, so that padding never more than doubles the work.
    """
    n, B = len(bounds) - 1, next(x for x in pieces if x is not None).shape[0]
    tokens = bounds[-1]
    groups: dict[int, list[int]] = {}
    for i in range(n):
        if bounds[i + 1] > bounds[i]:
            groups.setdefault((bounds[i + 1] - bounds[i]).bit_length(), []).append(i)
    states = list(torch.unflatten(state, 0, (B, n)).unbind(1)) if n else []
    rows, places = [], []
    for members in groups.values():
        index, valid = _places(members, bounds, state.device)  # (members, longest)
        cut = [None if x is None else _gather(x, index) for x in pieces]
        seen = valid if mask is None else mask[:, index] & valid
        seen = seen.expand(B, *index.shape).reshape(-1, index.shape[1])
        before = torch.stack([states[i] for i in members], 1).flatten(0, 1)
        out, after = run(cut, seen, before)
        flat = torch.unflatten(out, 0, (B, len(members))).movedim(1, 2).flatten(2, 3)  # (B, Ho, members * longest, M)
        spans = [torch.arange(bounds[i], bounds[i + 1], device=state.device) for i in members]
        real = [span - bounds[i] + k * index.shape[1] for k, (i, span) in enumerate(zip(members, spans, strict=True))]
        rows.append(flat[:, :, torch.cat(real)])
        places += spans
        for i, last in zip(members, torch.unflatten(after, 0, (B, len(members))).unbind(1), strict=True):
            states[i] = last
    order = torch.empty(tokens, dtype=torch.int64, device=state.device)
    order[torch.cat(places)] = torch.arange(tokens, device=state.device)
    return torch.cat(rows, 2)[:, :, order], torch.stack(states, 1).flatten(0, 1)


def _places(members: list[int], bounds: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token index (members, longest), where padding repeats the sequence's last token, and which are real."""
    starts = torch.tensor([bounds[i] for i in members], device=device).unsqueeze(1)
    ends = torch.tensor([bounds[i + 1] for i in members], device=device).unsqueeze(1)
    longest = max(bounds[i + 1] - bounds[i] for i in members)
    index = starts + torch.arange(longest, device=device)
    return torch.minimum(index, ends - 1), index < ends


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """(B, heads, T, ..) -> (B * members, heads, longest, ..)."""
    picked = torch.unflatten(x[:, :, index.flatten()], 2, index.shape)
    return picked.movedim(2, 1).flatten(0, 1)
