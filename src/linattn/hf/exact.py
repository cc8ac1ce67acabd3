"""Softmax with everything that layers of pretrained models add to it, for those that keep their own attention."""

import torch
from torch import Tensor

from ..nearfar.biases import capped


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    sinks: Tensor | None = None,
    cap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(B, Hq, L, M). mask: bool, broadcast to (B, Hq, L, S); sinks: (Hq), logits without a value; bias: (.., L, S)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    logits = capped(query @ key.mT * scale, cap)
    logits = logits if bias is None else logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if sinks is None:
        weights = logits.softmax(-1, dtype=_wide(logits)).nan_to_num()
    else:
        sink = sinks.to(logits.dtype).reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sink], -1).softmax(-1, dtype=_wide(logits))[..., :-1]
    return weights.to(value.dtype) @ value


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
