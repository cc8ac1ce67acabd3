"""How close a kernel is to softmax, always next to the plain mean of the values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional.attention import attention
from ..functional.implied_attention import implied_attention
from ..kernels import Kernel, KernelName, Softmax, resolve
from ..nearfar import NearFar
from ..ops.linear_attention import reference as oracle

ROWS = 1024  # attention matrices are compared for this many queries at most, the last ones


@dataclass(frozen=True)
class Fidelity:
    """Distance from exact softmax attention.

    Attributes:
        relative_error: |out - exact| / |exact| in the Frobenius norm.
        row_l1: mean L1 distance of attention rows from softmax's; 2 is the maximum between distributions.
        bad_rows: share of rows whose error exceeds the norm of the exact row; zeros would be closer.
        nonpositive: share of rows whose denominator is not positive.
        baseline: the same for the plain average of the values that a query may see.
    """

    relative_error: float
    row_l1: float
    bad_rows: float
    nonpositive: float
    baseline: "Fidelity | None" = None


@torch.no_grad()
def fidelity(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | KernelName,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Fidelity:
    """Compares a kernel with exact softmax on given queries, keys and values (..., heads, tokens, dim).

    >>> import torch, linattn
    >>> q, k, v = (torch.randn(1, 2, 200, 32) for _ in range(3))
    >>> report = linattn.measure.fidelity(q, k, v, "positive")
    >>> report.relative_error < 10 and report.baseline.row_l1 > 0
    True
    """
    kernel = resolve(kernel, query.shape[-1], query.device)
    if isinstance(kernel, NearFar) and (kernel.positions or kernel.logit_cap is not None):
        raise ValueError("fidelity compares with plain softmax, which has neither logit_cap nor position biases.")
    options: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask}
    exact = attention(query, key, value, kernel="softmax", scale=scale, enable_gqa=True, **options)
    out = attention(query, key, value, kernel=kernel, scale=scale, enable_gqa=True, **options)
    last = query[..., max(0, query.shape[-2] - ROWS) :, :]
    softmax_rows = implied_attention(last, key, "softmax", scale=scale, **options)
    if isinstance(kernel, NearFar):  # its slots follow the queries, so it needs all of them
        rows = implied_attention(query, key, kernel, value=value, scale=scale, **options)[..., -last.shape[-2] :, :]
    else:
        rows = implied_attention(last, key, kernel, scale=scale, **options)
    plain = attention(torch.ones_like(query), torch.ones_like(key), value, kernel="relu", enable_gqa=True, **options)
    plain_rows = implied_attention(torch.ones_like(last), torch.ones_like(key), "relu", **options)
    nonpositive = 0.0
    if not isinstance(kernel, (Softmax, NearFar)):
        total = oracle.similarities(last, key, kernel, scale=scale, **options).sum(-1)
        nonpositive = (total <= 0).double().mean().item()
    baseline = _compare(plain, exact, plain_rows, softmax_rows, 0.0, None)
    return _compare(out, exact, rows, softmax_rows, nonpositive, baseline)


def _compare(
    out: Tensor, exact: Tensor, rows: Tensor, softmax_rows: Tensor, nonpositive: float, baseline: Fidelity | None
) -> Fidelity:
    exact = exact.double()
    difference = out.double() - exact
    return Fidelity(
        relative_error=(difference.norm() / exact.norm().clamp_min(1e-300)).item(),
        row_l1=(rows.double() - softmax_rows.double()).abs().sum(-1).mean().item(),
        bad_rows=(difference.norm(dim=-1) > exact.norm(dim=-1)).double().mean().item(),
        nonpositive=nonpositive,
        baseline=baseline,
    )
