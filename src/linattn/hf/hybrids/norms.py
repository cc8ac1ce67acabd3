"""Gated norms of linear layers in one pass over memory; transformers' own take six to nine."""

from typing import Any

from torch import Tensor, nn

from ...engines import native
from ...engines.native import mixer
from ...engines.native.plans import eligible
from ..replaced import is_hooked

SUFFIX = "RMSNormGated"
ACTIVATIONS = {"silu": False, "swish": False, "sigmoid": True}


def options_of(norm: nn.Module) -> dict[str, Any] | None:
    """What linattn.engines.native.mixer.gated_norm computes this norm with; None for a norm that it does not know.

    Norms with an activation of their own (delta rules) are multiplied by the gate afterwards, the others (Mamba-2) before.
    """
    if not type(norm).__name__.endswith(SUFFIX) or not hasattr(norm, "variance_epsilon"):
        return None
    own: Any = norm
    if hasattr(norm, "activation"):
        sigmoid = ACTIVATIONS.get(own.activation)
        # Kimi's norms, which have a sigmoid, keep the weight in float32; Qwen's never do.
        wide = sigmoid and not type(norm).__name__.startswith("Qwen")
        return None if sigmoid is None else {"sigmoid": sigmoid, "wide_weight": wide}
    size = own.weight.shape[0]
    groups = size // own.group_size if hasattr(norm, "group_size") else getattr(norm, "n_groups", 1)
    first = not getattr(norm, "norm_before_gate", False)
    return {"groups": groups, "gate_first": first, "wide_weight": hasattr(norm, "norm_before_gate")}


class NormForward:
    """Stands in for `forward` on one gated norm."""

    def __init__(self, module: nn.Module):
        self.module: Any = module
        self.options = options_of(module) or {}

    def __call__(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        weight = self.module.weight
        given = (hidden_states, weight) if gate is None else (hidden_states, weight, gate)
        if not _served(hidden_states, gate) or not eligible(*given):
            return type(self.module).forward(self.module, hidden_states, gate)
        weight = weight.float().contiguous()
        out = mixer.gated_norm(hidden_states, gate, weight, self.module.variance_epsilon, **self.options)
        falcon = hasattr(self.module, "norm_before_gate")  # which drops the dimension of a single token
        return out.squeeze(1) if falcon and out.dim() == 3 and out.shape[1] == 1 else out


def plain_options(norm: Any) -> dict[str, Any] | None:
    """Its options if NormForward serves this norm and computing it in another place changes nothing: no hook would miss it."""
    served = norm.__dict__.get("forward")
    return served.options if isinstance(served, NormForward) and not is_hooked(norm) else None


def _served(x: Tensor, gate: Tensor | None) -> bool:
    if not x.is_cpu or x.dim() < 2 or native.dtype_refusal(x.dtype) is not None:
        return False
    return gate is None or (gate.dtype is x.dtype and gate.shape == x.shape)
