"""Finds the attention modules of a transformers model, and refuses unsupported ones."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from .biases import BUCKETS
from .own_softmax import has_own_softmax, slopes_of

V = TypeVar("V")
Layer = int | str
ByLayer = Mapping[int, V] | Mapping[str, V] | Mapping[Layer, V]


def attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that call transformers' attention interface, and those that `own_softmax` makes call it, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if has_own_softmax(module)
        or (hasattr(module, "is_causal") and hasattr(module, "layer_idx") and hasattr(module, "config"))
    ]


def layer_keys(found: Sequence[tuple[str, Any]]) -> list[Layer]:
    """What names each of these modules in a mapping: its layer's index, or its own name where several have the same index,
    as in encoder-decoder models."""
    indices = [module.layer_idx for _, module in found]
    if None in indices or len(set(indices)) < len(indices):
        return [name for name, _ in found]
    return [int(index) for index in indices]


def of_layer(given: ByLayer[V], name: str, module: Any) -> V | None:
    """The entry of a module, by its name or by its layer's index."""
    table = cast(Mapping[Layer, V], given)
    return table[name] if name in table else table.get(module.layer_idx)


def head_dim(module: Any) -> int:
    dim = getattr(module, "head_dim", None) or getattr(module, "key_value_proj_dim", None)
    return dim or module.config.hidden_size // module.config.num_attention_heads


def head_counts(module: Any) -> tuple[int, int]:
    """Query heads and kv heads."""
    if has_own_softmax(module):
        heads = getattr(module, "num_heads", None) or module.n_heads
        return heads, getattr(module, "num_kv_heads", heads)
    own = getattr(module, "num_heads", None) or getattr(
        module, "n_heads", None
    )  # a decoder's may differ from its encoder's
    heads = own or module.config.num_attention_heads
    if (groups := getattr(module, "num_key_value_groups", None)) is not None:
        return heads, heads // max(1, groups)
    return heads, getattr(module.config, "num_key_value_heads", None) or heads


def is_sliding(module: Any) -> bool:
    if has_own_softmax(module):
        return False
    window = getattr(module, "sliding_window", None)
    if window is None and getattr(module.config, "layer_types", None) is None:
        window = getattr(module.config, "sliding_window", None)
    return window is not None


def refuse_unsupported(name: str, module: Any, *, near_far: bool = False) -> None:
    """Raises for features of a layer that its kernel cannot reproduce; near/far can most of them."""
    relative = hasattr(module, "has_relative_attention_bias")
    known = type(module).__name__ in BUCKETS
    reasons = {
        "a relative position bias (has_relative_attention_bias)": relative and known and not near_far,
        "a relative position bias other than T5's (has_relative_attention_bias)": relative and not known,
        "capped logits (attn_logit_softcapping)": not near_far
        and getattr(module, "attn_logit_softcapping", None) is not None,
        "learned sinks in its softmax (sinks)": not near_far and hasattr(module, "sinks"),
        "a position bias that depends on the query (rel_logits_proj)": hasattr(module, "rel_logits_proj"),
        "an indexer that selects the keys of every query (indexer)": getattr(module, "indexer", None) is not None
        or getattr(module, "skip_topk", False),
        "ALiBi": not near_far and slopes_of(module) is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            kinds = "this kernel" if not near_far else "near/far"
            raise ValueError(
                f"cannot attach to {name} ({type(module).__name__}): it has {reason}, which {kinds} has no form for."
            )


def set_interface(model: Any, name: str) -> None:
    """Selects the attention function of a model by the name that it is registered under."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced.")


def is_attached(model: nn.Module) -> bool:
    """Whether linattn is attached to a model, to a part of it, or to a model that it is a part of."""
    ours = ("_linattn", "linattn_kernel", "linattn_biases")
    return any(
        any(name in module.__dict__ or name in module._modules for name in ours)  # noqa: SLF001
        or type(module.__dict__.get("forward")).__module__.startswith("linattn.hf")
        for module in model.modules()
    )


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations that select a model's attention, each once."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list(found.values())
