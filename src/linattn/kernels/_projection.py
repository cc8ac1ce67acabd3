"""Random projections, drawn from a seed of their own so that a kernel is the same on every machine and every run."""

import torch
from torch import Tensor


def gaussian(rows: int, dim: int, seed: int) -> Tensor:
    """(rows, dim), independent standard normal entries."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64)


def orthogonal(rows: int, dim: int, seed: int) -> Tensor:
    """(rows, dim) in blocks of `dim` orthogonal rows; each row alone is still a standard normal vector."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, rows, dim):
        directions = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q.T
        norms = torch.randn(dim, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
        blocks.append((directions * norms)[: rows - start])
    return torch.cat(blocks) if blocks else torch.empty(0, dim, dtype=torch.float64)
