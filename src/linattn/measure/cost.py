"""What attention costs by formula: FLOPs of the matrix products, and bytes that must be kept."""

from dataclasses import dataclass

import torch

from ..kernels import Exact, Kernel, resolve

CHUNK = 64  # the torch engine's
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cost:
    """Per head. FLOPs count matrix products (a multiplication and an addition are 2); elementwise work is O(N r).

    Attributes:
        flops: of all outputs.
        state_bytes: what streaming keeps, in float32: constant for linear kernels, growing for softmax.
        feature_dim: r, or None for softmax.
    """

    flops: int
    state_bytes: int
    feature_dim: int | None


def cost(kernel: Kernel | str, tokens: int, dim: int, value_dim: int, is_causal: bool = False) -> Cost:
    """FLOPs and bytes of attention over `tokens` queries and keys.

    Linear, non-causal: both projections (4 N D r for random features, nothing for elementwise ones), phi(K)^T [V, 1] and
    phi(Q) [S, Z] (2 N r (M + 1) each). Causal adds the products inside chunks of C: N C (2 r + 2 (M + 1)).
    Softmax: 2 N^2 (D + M), half of it when causal.

    >>> import linattn
    >>> linattn.measure.cost(linattn.kernels.Positive(64, features=256), 16384, 64, 64).flops
    2164260864
    >>> linattn.measure.cost("exact", 16384, 64, 64).flops
    68719476736
    """
    if min(tokens, dim, value_dim) < 0:
        raise ValueError(f"sizes must not be negative, got {tokens} tokens, dim {dim}, value_dim {value_dim}.")
    kernel = resolve(kernel, dim, _CPU)
    if isinstance(kernel, Exact):
        pairs = tokens * (tokens + 1) // 2 if is_causal else tokens**2
        return Cost(2 * pairs * (dim + value_dim), 4 * tokens * (dim + value_dim), None)
    r = kernel.features_for(dim)
    flops = tokens * (2 * kernel.projection_flops(dim) + 4 * r * (value_dim + 1))
    if is_causal:
        flops += tokens * min(tokens, CHUNK) * 2 * (r + value_dim + 1)
    return Cost(flops, 4 * r * (value_dim + 1), r)
