"""Expected Attention (Devoto et al. 2025): keys kept by the attention that queries to come are expected to pay them.

Queries before the rotation by their positions are taken as Gaussian, q ~ N(m, C) with the mean and covariance of those seen so
far. Averaged over the next `AHEAD` positions, the rotation is a matrix R, and q ~ N(R m, R C R^T). Then
E[exp(s q.k)] = exp(s k.Rm + s^2 / 2 k.RCR^T k): the expected weight of a key before the division by the sum.
"""

import torch
from torch import Tensor

AHEAD = 512  # positions to come over which the rotation is averaged
LEAST_WEIGHT = 0.02  # added to a key's expected share before its value's norm counts


def no_sums(query: Tensor, heads: int) -> Tensor:
    """(B, H, G (D + 1) D): the sums before any query (B, G H, ., D)."""
    B, Hq, _, D = query.shape
    return query.new_zeros(B, heads, Hq // heads * (D + 1) * D)


def add_queries(sums: Tensor, query: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """The sums with those of queries (B, H, G, n, D) at positions (n,): of q, and of q q^T, before the rotation."""
    B, H, G, _, D = query.shape
    x = rotate(query, -positions, frequencies)
    new = torch.cat([x.sum(3).unsqueeze(3), x.mT @ x], 3)  # (B, H, G, 1 + D, D)
    return sums + new.reshape(B, H, G * (D + 1) * D)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """x (..., n, D) turned by its positions (n,), pairs (i, i + D/2) by the angles positions * frequencies[i]."""
    angle = positions.to(x.dtype)[:, None] * frequencies.to(x.dtype)
    return turn(x, angle.cos(), angle.sin())


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (a, b) of the last dimension become (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def score(
    sums: Tensor, count: int, keys: Tensor, values: Tensor, *, end: int, scale: float, frequencies: Tensor
) -> Tensor:
    """(B, H, n) of keys (B, H, n, D): the larger, the more is expected of a key. count: of the queries that were added up."""
    B, H, _, D = keys.shape
    first = sums.reshape(B, H, -1, D + 1, D) / max(1, count)  # (B, H, G, 1 + D, D)
    mean, square = first[:, :, :, :1], first[:, :, :, 1:]
    covariance = square - mean.mT @ mean
    ahead = torch.arange(end, end + AHEAD, device=keys.device, dtype=keys.dtype)[:, None] * frequencies.to(keys.dtype)
    cos, sin = ahead.cos().mean(0), ahead.sin().mean(0)
    mean = turn(mean, cos, sin)
    covariance = turn(turn(covariance, cos, sin).mT, cos, sin)
    x = keys.unsqueeze(2)  # (B, H, 1, n, D)
    expected = scale * (x @ mean.mT).squeeze(-1) + scale**2 / 2 * ((x @ covariance) * x).sum(-1)
    return (expected.softmax(-1).mean(2) + LEAST_WEIGHT) * values.norm(dim=-1)
