"""The attention and mask functions that transformers calls."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    flash_attention_mask,
    sdpa_mask,
)

from ..functional import routing
from ..functional.attention import attention
from .biases import LayerBiases
from .cache import StateCache, StateLayer
from .eviction import Eviction
from .exact import exact, sdpa
from .learned_sinks import Tokens, as_a_token
from .modules import is_sliding

NAME = "linattn"
PADDING = "linattn_padding"  # whose mask is always a tensor: MPT converts it without looking
STATIC = "_dynamo_static_input_type"  # an attribute of the keys of static caches
NOT_OURS = (
    "a static cache came to a layer that linattn is not attached to, but whose configuration it changed for another part or "
    "model: which keys are written is not known here. Use a DynamicCache, or give the other one a configuration of its own."
)
CACHE = "linattn_cache"  # the keyword argument that brings a call's cache to `attend`

# Options that change the attention weights, and why they are not supported where the layer's kernel does not have them.
_REFUSED = {
    "position_bias": "a bias is added for every pair of positions",
    "head_mask": "heads are masked",
}
NO_BIASES = LayerBiases()


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
    layer = _cache_layer(module, kwargs.pop(CACHE, None))
    if layer is None or isinstance(layer, StaticLayer):
        key, value, attention_mask = _written(layer, key, value, attention_mask)
    sinks = kwargs.pop("s_aux", None)
    own = module.__dict__  # a module's getattr raises and catches for what is not there
    biases: LayerBiases = own.get("linattn_biases", NO_BIASES)
    biases.check_cap(module, kwargs.pop("softcap", None))
    if biases.understood:
        kwargs.pop("position_bias", None)  # T5 computes it for the keys of this call alone
    kernel = _kernel_of(module, sinks, biases)
    if kernel is None:
        mask = _full_mask(module, query, key, attention_mask, is_causal)
        if sinks is not None or biases is not NO_BIASES:
            tokens = Tokens(query, key, value, None)
            return _exact(module, tokens, mask, attention_mask, dropout, scaling, sinks, biases), None
        return sdpa(module, query, key, value, mask, dropout, scaling, is_causal, **kwargs)
    attention_mask = _hidden_keys(attention_mask)
    _refuse(module, attention_mask, dropout, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    key_mask = None if attention_mask is None else attention_mask[:, -key.shape[2] :].bool()
    if isinstance(kernel, Eviction):
        return _evict(kernel, layer, (query, key, value), key_mask, scaling)
    options: Any = {"kernel": kernel, "scale": scaling, "is_causal": causal, "enable_gqa": True}
    if isinstance(layer, StateLayer) and not causal:
        return _cross(layer, Tokens(query, key, value, key_mask), options).transpose(1, 2), None
    past = None
    if isinstance(layer, StateLayer):
        if own.get("is_kv_shared_layer", False):
            layer.update(key, value)  # the model updates the cache only for the layer that computed these keys
        past = layer.past()
    tokens = Tokens(query, key, value, key_mask)
    if sinks is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        tokens, options["scale"] = as_a_token(tokens, sinks, scale, past is None), scale
    if isinstance(layer, StateLayer):
        out, state = attention(*tokens[:3], key_mask=tokens.key_mask, state=past, return_state=True, **options)
        layer.hold(state)
    else:
        out = attention(*tokens[:3], key_mask=tokens.key_mask, **options)
    if sinks is not None:
        out = out[:, :, -query.shape[2] :]  # without the sinks' own row
    return out.transpose(1, 2), None


def _kernel_of(module: Any, sinks: Tensor | None, biases: LayerBiases) -> Any:
    """The layer's kernel; over shards, its own softmax in their form. None: the layer keeps its own attention."""
    kernel = getattr(module, "linattn_kernel", None)
    if routing.current() is None:
        return kernel
    if sinks is not None:
        raise ValueError(f"layer {module.layer_idx} has learned sinks, which have no form over shards.")
    if kernel is None and biases is not NO_BIASES:
        raise ValueError(
            f"layer {module.layer_idx} caps or biases its scores, which its softmax has no form over shards for."
        )
    if kernel is None and is_sliding(module):
        raise ValueError(f"layer {module.layer_idx} has a sliding window, which has no form over shards.")
    return "softmax" if kernel is None else kernel


def _cross(layer: StateLayer, tokens: Tokens, options: Any) -> Tensor:
    """Cross-attention with a state of the encoder's keys: made by the first call, read by later ones, which bring no keys."""
    query, key, value, key_mask = tokens
    if layer.state is None:
        out, state = attention(query, key, value, key_mask=key_mask, return_state=True, **options)
        layer.hold(state)
        return out
    B, (H, D), M = query.shape[0], (key.shape[1], key.shape[3]), value.shape[3]
    out, _ = attention(
        query, query.new_empty(B, H, 0, D), query.new_empty(B, H, 0, M), state=layer.state, return_state=True, **options
    )
    return out


def _exact(
    module: Any,
    tokens: Tokens,
    mask: Tensor | None,
    padding: Tensor | None,
    dropout: float,
    scaling: float | None,
    sinks: Tensor | None,
    biases: LayerBiases,
) -> Tensor:
    """(B, L, H, M), for layers that keep their own attention. padding: (B, S), where the mask is made of one."""
    if dropout:
        raise ValueError("attention dropout has no form here: set the model's attention dropout to 0 or call eval().")
    query, key, value, _ = tokens
    L, S = query.shape[2], key.shape[2]
    if mask is None and L > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(L, S, dtype=torch.bool, device=key.device).tril(S - L)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key_mask = padding[:, -S:] if padding is not None and padding.dim() == 2 else None
    bias = biases.exact(query, key, key_mask)
    return exact(query, key, value, mask, scale, sinks=sinks, cap=biases.cap, bias=bias).transpose(1, 2)


def _evict(
    kernel: Eviction, layer: Any, tokens: tuple[Tensor, Tensor, Tensor], key_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, None]:
    """Attention of one layer by a baseline that drops keys."""
    if key_mask is not None and not bool(key_mask.all()):
        raise ValueError("the baselines that drop keys take no padding.")
    past: Any = layer.past() if isinstance(layer, StateLayer) else None
    out, state = kernel.attend(*tokens, past, scale)
    if isinstance(layer, StateLayer):
        layer.hold(state)
    return out.transpose(1, 2), None


@dataclass(frozen=True)
class PassCache:
    """A forward pre-hook of attention modules: adds the call's cache to the keyword arguments.

    Attention modules hand their keyword arguments on to the attention function, which is not given the cache otherwise.
    The module itself is not changed, so threads may share a model.

    Attributes:
        parameters: the names of the positional parameters of the module's forward.
    """

    parameters: tuple[str, ...]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if type(cache) is StateCache:
            return args, {**kwargs, CACHE: cache}
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        cache = next((x for x in given.values() if isinstance(x, Cache)), None)
        if isinstance(cache, EncoderDecoderCache):
            cross = given.get("key_value_states") is not None or given.get("encoder_hidden_states") is not None
            cache = cache.cross_attention_cache if cross else cache.self_attention_cache
        return None if cache is None else (args, {**kwargs, CACHE: cache})

    @staticmethod
    def for_module(module: nn.Module) -> "PassCache | None":
        """None if the module's forward takes no further keyword arguments."""
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        return PassCache(tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD))


def make_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = causal_mask_function, **kwargs: Any
) -> Tensor | None:
    """The 2-D padding mask, or None; the full mask for sliding-window layers, which keep their own attention."""
    options = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "mask_function": mask_function}
    if kwargs.get("local_size") is not None:
        return sdpa_mask(**options, **{**kwargs, "allow_is_causal_skip": False})
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "linattn cannot serve this attention pattern (packed sequences by position_ids, prefix or image blocks): "
            "pass one sequence per row with an attention_mask (a compiled model always needs one), or call linattn.hf.detach."
        )
    return flash_attention_mask(**options, **kwargs)


def make_padding_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """`make_mask` for models with ALiBi: (batch, keys), True = attend, also where nothing is hidden."""
    found = make_mask(batch_size, q_length, kv_length, **kwargs)
    if found is None:
        return torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    return found.bool()


def _cache_layer(module: Any, cache: Cache | None) -> Any:
    """The cache entry of this module; None without a cache."""
    if cache is None or module.layer_idx is None:
        return None
    if module.layer_idx < len(cache.layers):
        return cache.layers[module.layer_idx]
    # Layers that share the keys of an earlier one have no entry of their own; all global layers are equally long.
    return next((layer for layer in cache.layers if not getattr(layer, "is_sliding", False)), None)


def _written(layer: Any, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without the unwritten positions of a static cache; sliding layers have a mask that hides them. None: no known cache."""
    if layer is None:
        _refuse_static(key, mask)
    if layer is None or layer.is_sliding:
        return key, value, mask
    if key.shape[2] != layer.max_cache_len:
        raise ValueError(
            f"a static cache of {layer.max_cache_len} tokens came with {key.shape[2]} keys: which of them are written is "
            "not known here. Use a DynamicCache or a linattn.hf.StateCache with this model."
        )
    tokens = int(layer.get_seq_length())
    mask = None if mask is None else mask[..., :tokens]  # some are as wide as the cache, such as BLOOM's
    if mask is not None and mask.dim() == 2 and bool(mask.all()):
        mask = None  # transformers always makes one for static caches
    return key[:, :, :tokens], value[:, :, :tokens], mask


def _refuse_static(key: Tensor, mask: Tensor | None) -> None:
    """Raises for the keys of a static cache that a module was not told of, unless a full mask says which are written."""
    if not torch.compiler.is_compiling() and STATIC in key.__dict__ and (mask is None or mask.dim() != 4):
        raise ValueError(NOT_OURS)


def _hidden_keys(mask: Tensor | None) -> Tensor | None:
    """A mask (batch, 1, 1, keys), also one that is added to scores, as (batch, keys); other masks as they are.

    Switch Transformers makes such a mask itself.
    """
    if mask is None or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        return mask
    if mask.dtype == torch.bool:
        return mask[:, 0, 0]
    shown = mask[:, 0, 0] == 0
    if not bool((shown | (mask[:, 0, 0] <= torch.finfo(torch.float16).min)).all()):
        return mask
    return None if bool(shown.all()) else shown


def _refuse(module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raises for options that change the attention weights; they are never ignored."""
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


def _full_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """The full mask for a layer that keeps its own attention; an attached model does not create one."""
    if mask is not None and mask.dim() == 4:
        return mask
    L, S = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and (not causal or L in (1, S)):
        return None
    table = torch.ones(1, 1, L, S, dtype=torch.bool, device=key.device)
    table = table.tril(S - L) if causal else table
    return table if mask is None else table & mask[:, None, None, -S:].bool()


# On import, so that an attached model that was pickled finds them in a process that never called `attach`.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
AttentionMaskInterface.register(PADDING, make_padding_mask)
