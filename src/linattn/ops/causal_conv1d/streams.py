"""Masked and packed tokens as one plain stream: each sequence's state, then its visible tokens, one sequence after the other.

A window of the convolution that starts at a token never reaches the sequence before, because the w - 1 inputs of the state
stand between them. Hidden tokens go to one place at the end, which is not part of the stream.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .call import CausalConv1dCall

Convolve = Callable[[Tensor], Tensor]  # a stream (b, c, s) -> its outputs (b, c, s), nothing before its start


class Streams(NamedTuple):
    """Places in streams of `length` inputs, for each batch entry."""

    length: int
    tokens: Tensor  # (b, t); `length` where hidden
    before: Tensor  # (b, n (w - 1)): of the states
    after: Tensor  # (b, n (w - 1)): of the new states


def lay_out(visible: Tensor, bounds: Sequence[int], carried: int) -> Streams:
    """visible (b, t) bool; carried: w - 1."""
    b, t = visible.shape
    n = len(bounds) - 1
    edges = torch.tensor(list(bounds), device=visible.device)
    seen = torch.cat([visible.new_zeros(b, 1, dtype=torch.int64), visible.cumsum(-1)], -1)  # (b, t + 1)
    sequence = torch.searchsorted(edges[1:], torch.arange(t, device=visible.device), right=True)
    tokens = seen[:, :-1] + (sequence + 1) * carried
    starts = seen[:, edges[:-1]] + torch.arange(n, device=visible.device) * carried  # (b, n)
    ends = starts + carried + seen[:, edges[1:]] - seen[:, edges[:-1]]
    place = torch.arange(carried, device=visible.device)
    length = t + n * carried
    return Streams(
        length,
        tokens.masked_fill(~visible, length),
        (starts.unsqueeze(-1) + place).view(b, n * carried),
        (ends.unsqueeze(-1) - carried + place).view(b, n * carried),
    )


def convolve_streams(convolve: Convolve, call: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """out (b, c, t) and the new state; `convolve` has the weights."""
    x, state, mask, bounds = call.x, call.state, call.mask, call.ends
    (b, c, t), carried = x.shape, call.weight.shape[1] - 1
    n = len(bounds) - 1
    visible = torch.ones(b, t, dtype=torch.bool, device=x.device) if mask is None else mask
    places = lay_out(visible, bounds, carried)

    def of_channels(index: Tensor) -> Tensor:
        return index.unsqueeze(1).expand(-1, c, -1)

    hidden = ~visible.unsqueeze(1)
    stream = x.new_zeros(b, c, places.length + 1)
    stream = stream.scatter(2, of_channels(places.tokens), x.masked_fill(hidden, 0))
    if state is not None:
        rows = state.view(b, n, c, carried).transpose(1, 2).reshape(b, c, n * carried)
        stream = stream.scatter(2, of_channels(places.before), rows)
    out = convolve(stream[..., : places.length])
    out = out.gather(2, of_channels(places.tokens.clamp_max(places.length - 1))).masked_fill(hidden, 0)
    last = stream.gather(2, of_channels(places.after)).view(b, c, n, carried).transpose(1, 2)
    return out, last.reshape(b * n, c, carried)
