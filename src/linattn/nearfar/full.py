"""Near/far attention without a causal mask: all keys are compressed once, and near ones taken out of their slots again.

A slot c that stands for the keys J holds the share p_j of each, sum_J p_j = 1. A block of queries takes the keys near it
exactly: it adds exp(x.y_j) and removes exp(logit_c) p_j of the slot that j went into. What is left of a slot is never
negative, so no row can fail.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.nearfar import NearFar
from . import slots
from .step import HIDDEN

STRETCH = 2**19  # numbers in the logits of the blocks that are attended to at once: they should stay in cache
TABLE = 2**23  # numbers in the costs of all pairs that are looked at together
SEGMENT = 512  # keys among which pairs are looked for: all pairs of a long row would be quadratic


Merge = Callable[[Tensor, Tensor, int, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]  # as slots.merge


def compress(
    query: Tensor, entries: Tensor, visible: Tensor | None, size: int, alpha: float, merge: Merge = slots.merge
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys (B, H, S, E) into `size` slots, by halving, in the metric of all queries (B, H, G, L, D).

    Returns slots (B, H, size, E), their biases, each key's slot (B, H, S) and the log of its share there.
    """
    B, H, S, _ = entries.shape
    D = query.shape[-1]
    with torch.no_grad():
        x = torch.nn.functional.pad(query.detach().flatten(2, 3), (0, 1), value=1.0)
        anchor, metric = slots.anchor_and_metric(x.mT @ x)
    bias = entries.new_zeros(B, H, S)
    if visible is not None:
        bias = bias.masked_fill(~visible.unsqueeze(1), -torch.inf)
    far, far_bias = entries, bias
    place = torch.arange(S, device=entries.device).expand(B, H, S)
    while far.shape[2] > size:
        far, far_bias, moved = _halve(far, far_bias, size, anchor, metric, alpha, merge)
        place = moved.gather(2, place)
    tilt = (entries[..., :D] * anchor).sum(-1) + bias
    weight = far_bias + (far[..., :D] * anchor).sum(-1)
    share = tilt - weight.masked_fill(weight == -torch.inf, 0).gather(2, place)
    return far, far_bias, place, share


def _halve(
    far: Tensor, bias: Tensor, size: int, anchor: Tensor, metric: Tensor, alpha: float, merge: Merge
) -> tuple[Tensor, Tensor, Tensor]:
    """Half as many slots, but not fewer than `size`; and where each of them went. Long rows are halved piece by piece."""
    B, H, n, E = far.shape
    piece = 2 * max(size, SEGMENT // 2)
    if n <= piece:
        return merge(far, bias, max(size, (n + 1) // 2), anchor, metric, alpha)
    k = -(-n // piece)
    pad = torch.nn.functional.pad
    far = pad(far, (0, 0, 0, k * piece - n)).reshape(B, H * k, piece, E)
    bias = pad(bias, (0, k * piece - n), value=-torch.inf).reshape(B, H * k, piece)
    anchor, metric = anchor.repeat_interleave(k, 1), metric.repeat_interleave(k, 1)
    some = max(1, TABLE // (B * piece * piece))
    parts = zip(*(x.split(some, 1) for x in (far, bias, anchor, metric)))
    merged = [merge(f, b, piece // 2, a, m, alpha) for f, b, a, m in parts]
    far, bias, moved = (torch.cat(x, 1) for x in zip(*merged))
    moved = moved.reshape(B, H, k, piece) + torch.arange(k, device=far.device)[:, None] * (piece // 2)
    return far.reshape(B, H, -1, E), bias.reshape(B, H, -1), moved.reshape(B, H, -1)[..., :n]


def cross(
    query: Tensor, entries: Tensor, visible: Tensor | None, size: int, alpha: float, merge: Merge = slots.merge
) -> Tensor:
    """Queries (B, H, G, L, D) that have no place among the keys: (B, H, G, L, M)."""
    B, H, G, L, D = query.shape
    far, bias, _, _ = compress(query, entries, visible, size, alpha, merge)
    logits = query.flatten(2, 3) @ far[..., :D].mT + bias.clamp_min(HIDDEN).unsqueeze(2)
    return (logits.softmax(-1) @ far[..., D:]).reshape(B, H, G, L, -1)


def attend(
    kernel: NearFar, query: Tensor, entries: Tensor, visible: Tensor | None, size: int, merge: Merge = slots.merge
) -> Tensor:
    """Queries (B, H, G, N, D) of the same tokens as the keys (B, H, N, E): (B, H, G, N, M). Without slots, a window alone."""
    B, H, G, N, D = query.shape
    block, window = kernel.block, kernel.window
    n = -(-N // block)
    reach, short = block + 2 * window, n * block - N
    pad = torch.nn.functional.pad

    def near_of(x: Tensor, value: float) -> Tensor:
        """(B, H, N, E) -> (B, H, n, reach, E): the keys around each block."""
        return pad(x, (0, 0, window, window + short), value=value).unfold(2, reach, block).transpose(-1, -2)

    shown = entries.new_ones(B, 1, N) if visible is None else visible.unsqueeze(1).to(entries.dtype)
    near = near_of(entries, 0)
    hidden = near_of(shown.unsqueeze(-1), 0).squeeze(-1) == 0  # (B, 1, n, reach)
    pooled = None
    if size > 0:
        far, bias, place, share = compress(query, entries, visible, size, kernel.alpha, merge)
        near_share = near_of(share.unsqueeze(-1), -torch.inf).squeeze(-1)
        near_place = near_of(place.unsqueeze(-1).to(near.dtype), 0).squeeze(-1).long()
        pooled = (far, bias, near_share, near_place)
    laid = pad(query, (0, 0, 0, short)).reshape(B, H, G, n, block, D)
    span = max(1, STRETCH // (B * H * G * block * (reach + size)))
    rows = []
    for i in range(0, n, span):
        cut = slice(i, i + span)
        x = laid[:, :, :, cut].transpose(2, 3).flatten(3, 4)  # (B, H, s, G block, D)
        if pooled is None:
            out = _window(x, near[:, :, cut], hidden[:, :, cut])
        else:
            far, bias, near_share, near_place = pooled
            out = _blocks(
                x, near[:, :, cut], hidden[:, :, cut], near_share[:, :, cut], near_place[:, :, cut], far, bias
            )
        rows.append(out.reshape(B, H, -1, G, block, entries.shape[-1] - D).transpose(2, 3).flatten(3, 4))
    return torch.cat(rows, 3)[:, :, :, :N]


def _window(x: Tensor, near: Tensor, hidden: Tensor) -> Tensor:
    """The keys around each block and nothing else; rows that have none are 0."""
    D = x.shape[-1]
    hidden = hidden.unsqueeze(-2)
    weights = (x @ near[..., :D].mT).masked_fill(hidden, HIDDEN).softmax(-1)
    return (weights @ near[..., D:]).masked_fill(hidden.all(-1, keepdim=True), 0)


def _blocks(x: Tensor, near: Tensor, hidden: Tensor, share: Tensor, place: Tensor, far: Tensor, bias: Tensor) -> Tensor:
    """x (B, H, s, r, D), near (B, H, s, k, E) and their shares and places (B, H, s, k): (B, H, s, r, M)."""
    D = x.shape[-1]
    far_logits = x @ far[..., :D].mT.unsqueeze(2) + bias[:, :, None, None, :]
    near_logits = x @ near[..., :D].mT
    near_logits = near_logits.masked_fill(hidden.unsqueeze(-2), HIDDEN)
    top = torch.maximum(far_logits.detach().amax(-1, keepdim=True), near_logits.detach().amax(-1, keepdim=True))
    far_weight, near_weight = (far_logits - top).exp(), (near_logits - top).exp()
    p = share.exp()
    gone = far_weight.new_zeros(*x.shape[:3], far.shape[2]).scatter_add(-1, place, p)
    taken = far_weight.gather(-1, place.unsqueeze(-2).expand(*x.shape[:4], -1)) * p.unsqueeze(-2)
    total = (far_weight * (1 - gone).clamp_min(0).unsqueeze(-2)).sum(-1, keepdim=True)
    total = total + near_weight.sum(-1, keepdim=True)
    mixed = far_weight @ far[..., D:].unsqueeze(2) + (near_weight - taken) @ near[..., D:]
    return mixed / total
