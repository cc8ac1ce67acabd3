"""Random projections, drawn from a seed of their own so that a kernel is the same on every machine and every run."""

import functools
from typing import Any

import torch
from torch import Tensor


# An operator, because torch.compile cannot look into a random generator: in a graph it is one node.
@torch.library.custom_op("linattn::draw", mutates_args=())
def draw(rows: int, dim: int, seed: int, orthogonal: bool) -> Tensor:
    """(rows, dim) of float32, standard normal; orthogonal in blocks of `dim` rows, each row alone still normal."""
    return _drawn(rows, dim, seed, orthogonal).clone()


@functools.lru_cache(maxsize=64)
def _drawn(rows: int, dim: int, seed: int, orthogonal: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    options: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}  # whatever the default device is
    if not orthogonal:
        return torch.randn(rows, dim, **options).float()
    blocks = []
    for start in range(0, rows, dim):
        Q, R = torch.linalg.qr(torch.randn(dim, dim, **options))
        directions = (Q * R.diagonal().sign()).T  # without the signs Q is not uniform, and the features are biased
        norms = torch.randn(dim, dim, **options).norm(dim=1, keepdim=True)
        blocks.append((directions * norms)[: rows - start])
    return torch.cat(blocks).float()


@draw.register_fake
def _(rows: int, dim: int, seed: int, orthogonal: bool) -> Tensor:
    return torch.empty(rows, dim, dtype=torch.float32, device="cpu")
