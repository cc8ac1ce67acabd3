"""Symmetric powers: every product of p coordinates once, weighted so that dot products give (x.y)^p."""

import functools
import math
from itertools import combinations_with_replacement, pairwise

import torch
from torch import Tensor


def count(dim: int, degree: int) -> int:
    """How many different products of `degree` coordinates there are."""
    return math.comb(dim + degree - 1, degree)


# An operator, so that torch.compile takes the table as one node instead of tracing how it is made.
@torch.library.custom_op("linattn::monomials", mutates_args=())
def table(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    """Indices (degree, count) of the factors of each product, and the root of how often it occurs in (x.y)^degree."""
    indices, weights = _table(dim, degree)
    return indices.clone(), weights.clone()


@table.register_fake
def _(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    products = count(dim, degree)
    indices = torch.empty(degree, products, dtype=torch.long, device="cpu")
    return indices, torch.empty(products, dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=32)
def _table(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    products = list(combinations_with_replacement(range(dim), degree))
    indices = torch.tensor(products, dtype=torch.long, device="cpu").T
    weights = torch.full((indices.shape[1],), float(math.factorial(degree)), dtype=torch.float64, device="cpu")
    run = torch.ones_like(weights)
    for previous, current in pairwise(indices):
        run = torch.where(previous == current, run + 1, 1.0)
        weights = weights / run  # divides by the factorial of each run of equal factors
    return indices, weights.sqrt()


def monomials(x: Tensor, degree: int) -> Tensor:
    """(..., dim) -> (..., count(dim, degree)), with monomials(x) . monomials(y) = (x.y)^degree."""
    if degree == 0:
        return torch.ones_like(x[..., :1])
    if degree == 1:
        return x
    if degree == 2:  # row by row of the upper triangle: gathering by index is many times slower
        weights = x.new_full((x.shape[-1],), math.sqrt(2)).index_fill(0, torch.tensor(0, device=x.device), 1.0)
        rows = range(x.shape[-1])
        return torch.cat([x[..., i : i + 1] * (x[..., i:] * weights[: x.shape[-1] - i]) for i in rows], -1)
    indices, weights = (part.to(x.device) for part in table(x.shape[-1], degree))
    product = x[..., indices[0]]
    for row in indices[1:]:
        product = product * x[..., row]
    return product * weights.to(x.dtype)
