"""The two functions that transformers calls: one attends, one makes the mask it gets."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    flash_attention_mask,
    sdpa_mask,
)

from .._functional import attention
from .cache import StateCache, StateLayer

NAME = "linattn"

# What a model may pass that changes the weights themselves, and why it cannot be kept.
_REFUSED = {
    "softcap": "logits are capped",
    "position_bias": "a bias is added for every pair of positions",
    "s_aux": "learned sinks are added to the softmax",
    "head_mask": "heads are masked",
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, (B, H, L, D) -> (B, L, H, M), by the kernel that `attach` gave it."""
    kernel = getattr(module, "linattn_kernel", None)
    if kernel is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            _full_mask(module, query, key, attention_mask, is_causal),
            dropout,
            scaling,
            is_causal,
            **kwargs,
        )
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"linattn cannot serve {type(module).__name__}: {why} ({name}). Call linattn.hf.detach.")
    if dropout:
        raise ValueError("attention dropout has no linear form: set the model's attention dropout to 0 or call eval().")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"linattn takes a (batch, tokens) attention mask, got one of shape {tuple(attention_mask.shape)}: "
            "an arbitrary mask has no linear form."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    key_mask = None if attention_mask is None else attention_mask[:, -key.shape[2] :].bool()
    options: Any = {"kernel": kernel, "scale": scaling, "key_mask": key_mask, "is_causal": causal, "enable_gqa": True}
    layer = _state_layer(module)
    if layer is None:
        out = attention(query, key, value, **options)
    else:
        if layer.state is None and layer.seen > key.shape[2]:
            raise ValueError("this cache has seen tokens, but holds no state of them.")
        out, layer.state = attention(query, key, value, state=layer.state, return_state=True, **options)
    return out.transpose(1, 2), None


def note_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: attention is never given the cache, so the module notes it on the way in."""
    cross = kwargs.get("key_value_states") is not None or kwargs.get("encoder_hidden_states") is not None
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    cache = found[0] if found else None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    module._linattn_cache = cache if isinstance(cache, StateCache) else None  # type: ignore[assignment]


def make_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = causal_mask_function, **kwargs: Any
) -> Tensor | None:
    """The 2-D padding mask, or None; a full table for layers that see a sliding window, which keep their own attention."""
    options = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "mask_function": mask_function}
    if kwargs.get("local_size") is not None:
        return sdpa_mask(**options, **{**kwargs, "allow_is_causal_skip": False})
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "linattn cannot serve this attention pattern (packed sequences by position_ids, prefix or image blocks): "
            "pass one sequence per row with an attention_mask, or call linattn.hf.detach."
        )
    return flash_attention_mask(**options, **kwargs)


def register() -> None:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def _state_layer(module: nn.Module) -> StateLayer | None:
    cache = getattr(module, "_linattn_cache", None)
    if cache is None:
        return None
    layer = cache.layers[module.layer_idx]
    return layer if isinstance(layer, StateLayer) else None


def _full_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """A layer that keeps its attention needs the whole table where others are given the 2-D mask."""
    if mask is None or mask.dim() == 4:
        return mask
    L, S = query.shape[2], key.shape[2]
    table = mask[:, None, None, -S:].bool().expand(-1, 1, L, -1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal:
        table = table & torch.ones(L, S, dtype=torch.bool, device=mask.device).tril(S - L)
    return table
