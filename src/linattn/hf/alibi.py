"""BLOOM and MPT, whose attention modules compute ALiBi themselves: a forward that calls the attention function instead."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

CLASSES = ("BloomAttention", "MptAttention")


def is_alibi(module: nn.Module) -> bool:
    return type(module).__name__ in CLASSES


def slopes_of(module: Any) -> Tensor | None:
    """(heads), as the model itself computes them; None for other modules."""
    if not is_alibi(module):
        return None
    code: Any = sys.modules[type(module).__module__]
    if type(module).__name__ == "BloomAttention":
        bias = code.build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)
    else:
        bias = code.build_mpt_alibi_tensor(module.n_heads, 2)
    slopes: Tensor = bias[:, 0, 1] - bias[:, 0, 0]
    return slopes


class AlibiForward:
    """Stands in for `forward` on one module of BLOOM or MPT; the class, and so every other model, keeps its own.

    function: called like transformers' attention functions. cache: the name of the keyword that brings the cache to it.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], cache: str):
        self.module: Any = module
        self.function, self.cache = function, cache

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self.module).__name__ == "BloomAttention":
            return self._bloom(hidden_states, *args, **kwargs)
        return self._mpt(hidden_states, *args, **kwargs)

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

    def _attend(
        self, tokens: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, cache: Any, scale: float, dropout: float
    ) -> Tensor:
        """(B, L, heads * dim)."""
        query, key, value = tokens
        if cache is not None:
            key, value = cache.update(key, value, self.module.layer_idx)
        if mask is not None and bool(mask.all()):
            mask = None
        options = {"dropout": dropout, "scaling": scale, "is_causal": True, self.cache: cache}
        out: Tensor = self.function(self.module, query, key, value, mask, **options)[0]
        return out.flatten(2)
