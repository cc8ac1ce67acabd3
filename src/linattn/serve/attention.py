"""The attention function of a served model: as before for one sequence, row by row for several."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..hf.attention import CACHE, PassCache
from ..hf.modules import attention_modules, configs_of
from .batching import BatchCache

PREFIX = "linattn_rows_"  # then the name of the implementation that serves one sequence
SUPPORTED = ("sdpa", "eager", "linattn")


def install(model: PreTrainedModel) -> bool:
    """Prepares a model for decode steps of several sequences; False if it can only decode one after the other.

    The engine calls the model from one thread. Nothing of a call is kept on a module.
    """
    modules = [module for _, module in attention_modules(model)]
    hooks = [PassCache.for_module(module) for module in modules]
    own = model.config._attn_implementation
    if any(hook is None for hook in hooks) or (modules and own not in SUPPORTED) or _shares_keys(model):
        return False
    if not modules:
        return True
    _register(own)
    for module, hook in zip(modules, hooks, strict=True):
        module.register_forward_pre_hook(hook, with_kwargs=True)
    for config in configs_of(model):
        if config._attn_implementation == own:
            config._attn_implementation_internal = PREFIX + own
    return model.config._attn_implementation == PREFIX + own


def _shares_keys(model: PreTrainedModel) -> bool:
    config: Any = model.config.get_text_config(decoder=True)
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or [])
    return chunked or bool(getattr(config, "num_kv_shared_layers", None))


def _register(own: str) -> None:
    """Registers the attention and mask functions that go by rows around those called `own`."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(rows, heads, L, D) -> (rows, L, heads, M)."""
        inner = _function(module, own)
        cache = kwargs.pop(CACHE, None)
        if not isinstance(cache, BatchCache):
            return inner(module, query, key, value, attention_mask, **{**kwargs, **_with(own, cache)})
        layer: Any = cache.layers[module.layer_idx]
        outs = []
        for row, q, (k, v) in zip(cache.rows, query.split(1), layer.current, strict=True):
            outs.append(inner(module, q, k, v, None, **{**kwargs, **_with(own, row)})[0])
        return torch.cat(outs), None

    def mask(
        batch_size: int, q_length: int, kv_length: int, mask_function: Any = causal_mask_function, **kwargs: Any
    ) -> Any:
        """None for a decode step of several rows: each row's only query sees all of its keys."""
        if batch_size > 1:
            return None
        make = ALL_MASK_ATTENTION_FUNCTIONS[own]
        return make(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, mask_function=mask_function, **kwargs
        )

    AttentionInterface.register(PREFIX + own, attend)
    AttentionMaskInterface.register(PREFIX + own, mask)


def _function(module: Any, own: str) -> Any:
    if own != "eager":
        return ALL_ATTENTION_FUNCTIONS[own]
    import sys

    return sys.modules[type(module).__module__].eager_attention_forward  # each model has its own


def _with(own: str, cache: Cache | None) -> dict[str, Any]:
    """The cache, for the one implementation that takes it."""
    return {CACHE: cache} if own == "linattn" and cache is not None else {}
