"""Kimi delta attention (KDA) of Kimi Linear, GLM-5-Next and Bailing hybrid: what is between the projections is one native call
where it can be."""

from typing import Any

import torch
from torch import Tensor

from ...engines.native.plans import eligible
from ..replaced import is_hooked
from .delta_pass import DeltaParts, Projections, find_states, run, serves
from .forward import EngineForward

CLASSES = {"KimiLinearDeltaAttention", "Glm5NextTextLinearAttention", "BailingHybridDeltaAttention"}
GATES = {"KimiLinearForgetGate", "Glm5NextTextForgetGate", "BailingHybridForgetGate"}


class KimiDeltaForward(EngineForward):
    """Stands in for `forward` on one layer of Kimi delta attention."""

    def __call__(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """(B, T, width) -> (B, T, width)."""
        own, tokens = self.module, hidden_states.shape[1]
        parts = _parts(own, hidden_states)
        states = None if parts is None else find_states(parts, cache_params, hidden_states.shape[0], kwargs)
        if parts is not None and states is not None and serves(parts, tokens, states, cache_params):
            x = hidden_states
            if attention_mask is not None:
                x = (x * attention_mask[:, :, None]).to(x.dtype)
            out = run(parts, _project(own, x), states, cache_params)
            if out is not None:
                return own.o_proj(out)
        return super().__call__(hidden_states, cache_params, attention_mask, **kwargs)


def _parts(own: Any, x: Tensor) -> DeltaParts | None:
    """None where some other way to compute the layer is asked for."""
    gate = own.forget_gate
    if x.dtype is not torch.float32 or not eligible(x) or hasattr(own.conv1d, "_hf_hook"):
        return None
    if type(gate).__name__ not in GATES or is_hooked(gate) or "forward" in gate.__dict__:
        return None
    bound = _bound(gate)
    if bound is None:
        return None
    H, D = own.num_heads, own.head_dim
    return DeltaParts(own, own.o_norm, gate.A_log.flatten(), gate.dt_bias.view(H, D), H, H, D, D, bound)


def _bound(gate: Any) -> float | None:
    """The lower bound of the log decay, 0 without one; None for a bound that bounds nothing."""
    if hasattr(gate, "safe_gate"):
        bound = gate.lower_bound if gate.safe_gate else None
    else:
        bound = getattr(gate, "safe_gate_lower_bound", None)
    return 0.0 if bound is None else float(bound) if bound < 0 else None


def _project(own: Any, x: Tensor) -> Projections:
    heads, gate = (own.num_heads, 1), own.forget_gate
    mixed = own.q_proj(x), own.k_proj(x), own.v_proj(x)
    z = own.g_proj(x) if hasattr(own, "g_proj") else own.g_b_proj(own.g_a_proj(x))
    a = gate.f_proj(x) if hasattr(gate, "f_proj") else gate.f_b_proj(gate.f_a_proj(x))
    z, a = z.unflatten(-1, (*heads, own.head_dim)), a.unflatten(-1, (*heads, own.head_dim))
    return Projections(mixed, z, own.b_proj(x).unflatten(-1, heads), a)
