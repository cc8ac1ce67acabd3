"""Translates torch's masks: padding of keys, and causal or not."""

import torch
from torch import Tensor

from ..kernels.base import is_plain


def key_mask_of(key_padding_mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """True = attend, from torch's True = ignore, or from 0 and -inf."""
    if key_padding_mask is None:
        return None
    if key_padding_mask.shape != (batch, tokens):
        raise ValueError(f"key_padding_mask must be {(batch, tokens)}, got {tuple(key_padding_mask.shape)}.")
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    return _visible(key_padding_mask, "key_padding_mask")


def causal_by(attn_mask: Tensor | None, is_causal: bool, queries: int, keys: int) -> bool:
    """Whether the mask or torch's `is_causal` makes a call causal; a mask that is neither causal nor all visible is refused,
    and so is one that `is_causal` contradicts. Where values cannot be read, in a compiled graph, `is_causal` is trusted."""
    if attn_mask is None:
        return is_causal
    if attn_mask.shape[-2:] == (queries, keys):
        if is_causal and not is_plain(attn_mask):
            return True
        visible = ~attn_mask if attn_mask.dtype == torch.bool else _visible(attn_mask, "attn_mask")
        if not is_causal and bool(visible.all()):
            return False
        causal = torch.ones(queries, keys, dtype=torch.bool, device=visible.device).tril(keys - queries)
        if bool((visible == causal).all()):
            return True
    raise ValueError(
        f"an attn_mask of shape {tuple(attn_mask.shape)} that is not causal has no linear form: every query would need sums "
        "of its own. Pass is_causal=True without a mask (the last query sees all keys), key_padding_mask for padding, or keep "
        "torch's module here."
    )


def _visible(mask: Tensor, name: str) -> Tensor:
    visible = mask == 0
    if not bool((visible | (mask == -torch.inf)).all()):
        raise ValueError(
            f"{name} adds numbers to the scores, which a linear kernel never forms: only 0 and -inf will do."
        )
    return visible
