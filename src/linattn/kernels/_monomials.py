"""Symmetric powers: every product of p coordinates once, weighted so that dot products give (x.y)^p."""

import functools
import math
from itertools import combinations_with_replacement

import torch
from torch import Tensor


def count(dim: int, degree: int) -> int:
    """How many different products of `degree` coordinates there are."""
    return math.comb(dim + degree - 1, degree)


@functools.lru_cache(maxsize=32)
def _table(dim: int, degree: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices (degree, count) of the factors of each product, and the root of how often it occurs in (x.y)^degree."""
    if degree == 2:
        indices = torch.triu_indices(dim, dim)
    else:
        indices = torch.tensor(list(combinations_with_replacement(range(dim), degree)), dtype=torch.long).T
    weights = torch.full((indices.shape[1],), float(math.factorial(degree)), dtype=torch.float64)
    run = torch.ones_like(weights)
    for previous, current in zip(indices[:-1], indices[1:]):
        run = torch.where(previous == current, run + 1, 1.0)
        weights = weights / run  # divides by the factorial of each run of equal factors
    return indices.to(device), weights.sqrt().to(device)


def monomials(x: Tensor, degree: int) -> Tensor:
    """(..., dim) -> (..., count(dim, degree)), with monomials(x) . monomials(y) = (x.y)^degree."""
    if degree == 0:
        return torch.ones_like(x[..., :1])
    if degree == 1:
        return x
    indices, weights = _table(x.shape[-1], degree, x.device)
    product = x[..., indices[0]]
    for row in indices[1:]:
        product = product * x[..., row]
    return product * weights.to(x.dtype)
