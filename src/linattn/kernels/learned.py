"""A trainable feature map, initialised near the identity."""

import math

import torch
from torch import Tensor, nn

from ._projection import draw
from .base import Kernel


class Learned(Kernel):
    """phi(x) = [softmax(W x), softmax(-W x)], W trained (Hedgehog; Zhang et al., 2024). Queries and keys have their own W.

    W starts as the identity, filled up with random orthogonal rows where there are more features than coordinates.

    >>> import torch, linattn
    >>> kernel = linattn.kernels.Learned(64, features=32)
    >>> kernel.feature_dim, sum(p.numel() for p in kernel.parameters())
    (64, 4096)

    Args:
        dim: of queries and keys.
        features: rows of W; there are twice as many features. By default dim.
        heads: a map for each head; None shares one among all.
        kv_heads: heads of the keys where they differ from the queries'.
        seed: of the random rows.
    """

    only_parameters = True

    def __init__(
        self,
        dim: int,
        features: int | None = None,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        seed: int = 0,
    ):
        super().__init__(dim)
        features = dim if features is None else features
        if features < 1:
            raise ValueError(f"Learned: features must be at least 1, got {features}.")
        self.features, self.heads, self.kv_heads, self.seed = features, heads, kv_heads or heads, seed
        start = torch.eye(dim)[:features]
        if features > dim:
            extra = nn.functional.normalize(draw(features - dim, dim, seed, True), dim=-1)
            start = torch.cat([start, extra])
        self.query_map = nn.Parameter(start.clone() if heads is None else start.repeat(heads, 1, 1))
        self.key_map = nn.Parameter(start.clone() if self.kv_heads is None else start.repeat(self.kv_heads, 1, 1))

    def features_for(self, dim: int) -> int:
        return 2 * self.features

    def projection_flops(self, dim: int) -> int:
        return 2 * dim * self.features

    def query_features(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        return self._map(query, self.query_map, scale)

    def key_features(self, key: Tensor, *, scale: float | None = None) -> Tensor:
        return self._map(key, self.key_map, scale)

    def _map(self, x: Tensor, weight: Tensor, scale: float | None) -> Tensor:
        x = self.widen(x)
        if scale is not None:
            x = x * math.sqrt(scale)
        if weight.dim() == 3 and (x.dim() < 3 or x.shape[-3] != weight.shape[0]):
            raise ValueError(f"Learned has maps for {weight.shape[0]} heads; tokens of shape {tuple(x.shape)} do not.")
        logits = x @ weight.to(x.dtype).mT
        return torch.cat([logits.softmax(-1), (-logits).softmax(-1)], -1)

    def extra_repr(self) -> str:
        heads = "" if self.heads is None else f", heads={self.heads}, kv_heads={self.kv_heads}"
        return f"dim={self.dim}, features={self.features}{heads}, seed={self.seed}"
