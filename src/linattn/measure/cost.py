"""The cost of attention by formula: FLOPs of the matrix products, and bytes of the state."""

from dataclasses import dataclass

import torch

from ..kernels import Kernel, KernelName, Softmax, resolve
from ..nearfar import NearFar

CHUNK = 64  # the torch engine's
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cost:
    """Per head. FLOPs count matrix products (a multiplication and an addition are 2); elementwise work is O(N r).

    Attributes:
        flops: of all outputs.
        state_bytes: size of the state in float32: constant for linear kernels, growing for softmax.
        feature_dim: r, or None for softmax and near/far.
    """

    flops: int
    state_bytes: int
    feature_dim: int | None


def cost(kernel: Kernel | KernelName, tokens: int, dim: int, value_dim: int, is_causal: bool = False) -> Cost:
    """FLOPs and bytes of attention over `tokens` queries and keys.

    Linear, non-causal: both projections (4 N D r for random features, nothing for elementwise ones), phi(K)^T [V, 1] and
    phi(Q) [S, Z] (2 N r (M + 1) each). Causal adds the products inside chunks of C: N C (2 r + 2 (M + 1)).
    Softmax: 2 N^2 (D + M), half of it when causal. Near/far: every query against its window, the sinks and the slots, and
    once for each block of tokens the distances of all slots.

    >>> import linattn
    >>> linattn.measure.cost(linattn.kernels.Positive(64, features=256), 16384, 64, 64).flops
    2164260864
    >>> linattn.measure.cost("softmax", 16384, 64, 64).flops
    68719476736
    """
    if min(tokens, dim, value_dim) < 0:
        raise ValueError(f"sizes must not be negative, got {tokens} tokens, dim {dim}, value_dim {value_dim}.")
    kernel = resolve(kernel, dim, _CPU)
    if isinstance(kernel, Softmax):
        pairs = tokens * (tokens + 1) // 2 if is_causal else tokens**2
        return Cost(2 * pairs * (dim + value_dim), 4 * tokens * (dim + value_dim), None)
    if isinstance(kernel, NearFar):
        return _near_far(kernel, tokens, dim, value_dim, is_causal)
    r = kernel.features_for(dim)
    flops = tokens * (2 * kernel.projection_flops(dim) + 4 * r * (value_dim + 1))
    if is_causal:
        flops += tokens * min(tokens, CHUNK) * 2 * (r + value_dim + 1)
    return Cost(flops, 4 * r * (value_dim + 1), r)


def _near_far(kernel: NearFar, tokens: int, dim: int, value_dim: int, is_causal: bool) -> Cost:
    slots = kernel.slots if isinstance(kernel.slots, int) else sum(kernel.slots) / len(kernel.slots)
    exact = kernel.window * (1 if is_causal else 2) + kernel.block
    seen = min(tokens, exact + kernel.sinks + slots)
    merges = max(0, tokens - exact - kernel.sinks - slots) / kernel.block
    flops = 2 * tokens * seen * (dim + value_dim) + merges * 2 * (slots + kernel.block) ** 2 * (dim + value_dim)
    if is_causal:  # the logits of sampled queries once more
        flops += 2 * tokens / kernel.stride * seen * dim
    total: float = kernel.state_bytes(round(slots), dim, value_dim, 1)
    blocks = (kernel.recall,) if isinstance(kernel.recall, int) else kernel.recall
    for recalled in blocks:  # one kv head of len(blocks)
        if recalled and is_causal:
            far, unit = max(0, tokens - kernel.window), kernel.recall_unit
            pairs = far * min(far, 2 * recalled * unit) / 2
            flops += (far**2 / unit * 2 * dim + pairs * 2 * (dim + value_dim)) / len(blocks)
            total += far * kernel.recall_bytes(dim, value_dim) / len(blocks)
    return Cost(round(flops), round(total), None)
