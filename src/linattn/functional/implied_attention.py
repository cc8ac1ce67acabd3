"""linattn.implied_attention: the attention matrix that a kernel implies."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import Kernel, KernelName, Softmax
from ..kernels.names import constant
from ..nearfar import NearFar
from ..ops.linear_attention import reference
from . import checks
from .attention import attention

SMALL = 1e-7  # of the largest value: squared, beneath the last bits of a distance of values in float64


def implied_attention(
    query: Tensor,
    key: Tensor,
    kernel: Kernel | KernelName,
    *,
    value: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    exact_similarity: bool = False,
) -> Tensor:
    """The N x N attention matrix that a kernel implies, for inspection; the linear form never computes it.

    >>> import torch, linattn
    >>> q, k = torch.randn(2, 8, 5, 16), torch.randn(2, 8, 5, 16)
    >>> linattn.implied_attention(q, k, "elu", is_causal=True).sum(-1).allclose(torch.ones(2, 8, 5))
    True

    Args:
        query, key: (..., heads, L, dim) and (..., kv heads, S, dim).
        value: (..., kv heads, S, value dim), for near/far, which merges keys by their values too: the matrix is then that of
            attention with these values. Without it, values are taken as equally far from each other. Others ignore it.
        exact_similarity: use the similarity that the kernel approximates instead of its features.
    """
    checks.check_inputs(query, key, key, True)
    if scale is not None:
        checks.check_scale(scale)
    if key_mask is not None:
        checks.check_mask(key_mask, tuple(key.shape[:-3]), key.shape[-2])
    made = constant(kernel, query)
    if isinstance(made, NearFar):
        if not exact_similarity:
            one = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            options: dict[str, Any] = {
                "kernel": made,
                "scale": scale,
                "key_mask": key_mask,
                "enable_gqa": True,
                "is_causal": is_causal,
            }
            return (
                attention(query, key, one, **options)
                if value is None
                else _beside_values(query, key, value, one, options)
            )
        if made.positions or made.logit_cap is not None:
            raise ValueError(
                "exact_similarity is that of plain softmax, which has neither logit_cap nor position biases."
            )
        made = Softmax(query.shape[-1])
    return reference.weights(
        query,
        key,
        made,
        is_causal=is_causal,
        scale=scale,
        key_mask=key_mask,
        from_features=not exact_similarity,
    )


def _beside_values(query: Tensor, key: Tensor, value: Tensor, one: Tensor, options: dict[str, Any]) -> Tensor:
    """The weights, read off columns beside the values that are too small to change a merge."""
    checks.check_inputs(query, key, value, True)
    wide = value.double()
    small = SMALL * wide.abs().amax(tuple(range(-2, 0)), keepdim=True).clamp_min(1e-30)
    out = attention(query.double(), key.double(), torch.cat([wide, one.double() * small], -1), **options)
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    small = small.repeat_interleave(groups, -3) if groups > 1 else small
    return (out[..., value.shape[-1] :] / small).to(query.dtype)
