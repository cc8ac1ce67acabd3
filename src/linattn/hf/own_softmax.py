"""BLOOM, MPT and Falcon, whose attention modules compute softmax themselves: a forward that calls the attention function."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

CLASSES = ("BloomAttention", "MptAttention", "FalconAttention")
Tokens = tuple[Tensor, Tensor, Tensor]


def has_own_softmax(module: nn.Module) -> bool:
    return type(module).__name__ in CLASSES


def slopes_of(module: Any) -> Tensor | None:
    """(heads), of ALiBi, as the model itself computes them; None for modules without it."""
    kind = type(module).__name__
    if not has_own_softmax(module) or (kind == "FalconAttention" and not module.config.alibi):
        return None
    code: Any = sys.modules[type(module).__module__]
    if kind == "MptAttention":
        bias = code.build_mpt_alibi_tensor(module.n_heads, 2)
    else:
        bias = code.build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)
    slopes: Tensor = bias[:, 0, 1] - bias[:, 0, 0]
    return slopes * module.inv_norm_factor if kind == "FalconAttention" else slopes


class InterfaceForward:
    """Stands in for `forward` on one of these modules; the class, and so every other model, keeps its own.

    function: called like transformers' attention functions. cache: the name of the keyword that brings the cache to it.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], cache: str):
        self.module: Any = module
        self.function, self.cache = function, cache

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kinds: tuple[Callable[..., Any], ...] = (self._bloom, self._mpt, self._falcon)
        return dict(zip(CLASSES, kinds, strict=True))[type(self.module).__name__](hidden_states, *args, **kwargs)

    def _bloom(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        module = self.module
        query, key, value = (
            x.transpose(1, 2)
            for x in module.query_key_value(hidden_states).unflatten(2, (module.num_heads, 3, -1)).unbind(3)
        )
        dropout = module.attention_dropout.p if module.training else 0.0
        out = self._attend((query, key, value), attention_mask, layer_past, module.inv_norm_factor, dropout)
        return residual + drop(module.dense(out), module.hidden_dropout, module.training), None

    def _mpt(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        module = self.module
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = (x.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2))
        dropout = module.attn_dropout_p if module.training else 0.0
        out = self._attend((query, key, value), attention_mask, past_key_values, module.softmax_scale, dropout)
        return module.out_proj(out), None

    def _falcon(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        module = self.module
        # Heads lie in groups of query heads, their key and their value; one group for multi-query attention.
        grouped = module.query_key_value(hidden_states).unflatten(2, (module.num_kv_heads, -1, module.head_dim))
        query, key, value = (
            x.transpose(1, 2) for x in (grouped[..., :-2, :].flatten(2, 3), *grouped[..., -2:, :].unbind(3))
        )
        dropout = 0.0
        if alibi is not None:
            dropout = module.attention_dropout.p if module.training else 0.0
        elif position_embeddings is not None:
            code: Any = sys.modules[type(module).__module__]
            query, key = code.apply_rotary_pos_emb(query, key, *position_embeddings)
        out = self._attend((query, key, value), attention_mask, layer_past, module.inv_norm_factor, dropout)
        return module.dense(out), None

    def _attend(self, tokens: Tokens, mask: Tensor | None, cache: Any, scale: float, dropout: float) -> Tensor:
        """(B, L, heads * dim)."""
        query, key, value = tokens
        if cache is not None:
            key, value = cache.update(key, value, self.module.layer_idx)
        if mask is not None and bool(mask.all()):
            mask = None
        options = {"dropout": dropout, "scaling": scale, "is_causal": True, self.cache: cache}
        out: Tensor = self.function(self.module, query, key, value, mask, **options)[0]
        return out.flatten(2)
