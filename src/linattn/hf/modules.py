"""Finds the attention modules of a transformers model, and refuses unsupported ones."""

from typing import Any

from torch import nn


def attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that call transformers' attention interface, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx") and hasattr(module, "config")
    ]


def head_dim(module: Any) -> int:
    return getattr(module, "head_dim", None) or module.config.hidden_size // module.config.num_attention_heads


def is_sliding(module: Any) -> bool:
    window = getattr(module, "sliding_window", None)
    if window is None and getattr(module.config, "layer_types", None) is None:
        window = getattr(module.config, "sliding_window", None)
    return window is not None


def refuse_unsupported(name: str, module: Any, *, learned_sinks: bool = False) -> None:
    """Raises for features of a layer that linear-time attention cannot reproduce; near/far can have learned sinks."""
    reasons = {
        "a relative position bias (has_relative_attention_bias)": hasattr(module, "has_relative_attention_bias"),
        "capped logits (attn_logit_softcapping)": getattr(module, "attn_logit_softcapping", None) is not None,
        "learned sinks in its softmax (sinks)": hasattr(module, "sinks") and not learned_sinks,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(
                f"cannot attach to {name} ({type(module).__name__}): it has {reason}, which near/far and linear kernels "
                "have no form for."
            )


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations that select a model's attention, each once."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list(found.values())
