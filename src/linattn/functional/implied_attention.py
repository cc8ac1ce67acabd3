"""linattn.implied_attention: the attention matrix that a kernel implies."""

import torch
from torch import Tensor

from ..kernels import Kernel, KernelName, Softmax
from ..kernels.names import constant
from ..nearfar import NearFar
from ..ops.linear_attention import reference
from . import checks
from .attention import attention


def implied_attention(
    query: Tensor,
    key: Tensor,
    kernel: Kernel | KernelName,
    *,
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
        exact_similarity: use the similarity that the kernel approximates instead of its features.
    """
    checks.check_inputs(query, key, key, True)
    checks.check_scale(scale)
    if key_mask is not None:
        checks.check_mask(key_mask, tuple(key.shape[:-3]), key.shape[-2])
    made = constant(kernel, query)
    if isinstance(made, NearFar):
        if not exact_similarity:
            one = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            return attention(
                query, key, one, None, 0.0, is_causal, kernel=made, scale=scale, key_mask=key_mask, enable_gqa=True
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
