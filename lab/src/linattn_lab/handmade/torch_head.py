"""The same head in PyTorch: vectorised over batches, trainable."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from .numpy_head import Weights


class TorchHead(nn.Module):
    """One attention head on (..., n, d_in) tokens; the PyTorch twin of `single_head`."""

    def __init__(self, Km: Tensor, Qm: Tensor, Vm: Tensor, pos: Tensor | None = None, pos_end: Tensor | None = None):
        super().__init__()
        self.Km, self.Qm, self.Vm = nn.Parameter(Km), nn.Parameter(Qm), nn.Parameter(Vm)
        self.pos = None if pos is None else nn.Parameter(pos)
        self.pos_end = None if pos_end is None else nn.Parameter(pos_end)

    @staticmethod
    def of(weights: Weights) -> "TorchHead":
        """With given weights, in float64."""
        return TorchHead(*(None if w is None else torch.tensor(w, dtype=torch.float64) for w in _parts(weights)))  # type: ignore[arg-type]

    @staticmethod
    def random(like: Weights, seed: int, spread: float = 0.5) -> "TorchHead":
        """Of the same shapes, drawn at random: weights with this spread, positions with spread 1."""
        generator = torch.Generator().manual_seed(seed)
        spreads = (spread, spread, spread, 1.0, 1.0)
        return TorchHead(
            *(
                None if w is None else torch.randn(w.shape, generator=generator, dtype=torch.float64) * s
                for w, s in zip(_parts(like), spreads, strict=False)
            )  # type: ignore[arg-type]
        )

    def weights(self) -> Weights:
        """As NumPy arrays."""
        parts = (self.Km, self.Qm, self.Vm, self.pos, self.pos_end)
        return Weights(*(None if p is None else p.detach().numpy().copy() for p in parts))  # type: ignore[arg-type]

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., n, d_in) -> query, key (..., n, d_qk) and value (..., n, d_v)."""
        n = tokens.shape[-2]
        parts = [tokens]
        if self.pos is not None:
            parts.append(self.pos[:n].expand(*tokens.shape[:-2], -1, -1))
        if self.pos_end is not None:
            parts.append(self.pos_end[:n].flip(0).expand(*tokens.shape[:-2], -1, -1))
        x = torch.cat(parts, -1) if len(parts) > 1 else tokens
        return x @ self.Qm, x @ self.Km, x @ self.Vm

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        return scores.softmax(-1) @ value


def _parts(weights: Weights) -> tuple[np.ndarray | None, ...]:
    return weights.Km, weights.Qm, weights.Vm, weights.pos, weights.pos_end
