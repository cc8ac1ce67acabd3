"""Softmax with everything that layers of pretrained models add to it, for those that keep their own attention."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..nearfar.biases import capped


def sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' own attention function, also for modules that do not tell it how many query heads share a key."""
    if not hasattr(module, "num_key_value_groups"):
        key, value = _repeated(query, key, value)
    return sdpa_attention_forward(module, query, key, value, mask, *args, **kwargs)


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
    key, value = _repeated(query, key, value)
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


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A key and a value for every query head."""
    groups = query.shape[1] // key.shape[1]
    return (key, value) if groups == 1 else (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
