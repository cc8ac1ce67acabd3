"""One token of Mamba-2's layer: the projections, and four calls of the engine between them."""

from typing import Any

import torch
from torch import Tensor

from ...engines.native import available, mixer
from ...engines.native.plans import eligible
from .forward import EngineForward

# Families whose layers are the same but for their names. Falcon-H1 has multipliers in between.
CLASSES = {
    "Mamba2Mixer",
    "BambaMixer",
    "GraniteMoeHybridMambaLayer",
    "NemotronHMamba2Mixer",
    "Zamba2MambaMixer",
}


class Mamba2Forward(EngineForward):
    """Stands in for `forward` on one layer of Mamba-2: one token in float32 has a path of its own."""

    def __call__(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        own = self.module
        if hidden_states.shape[1] == 1 and cache_params is not None and attention_mask is None:
            held = cache_params.get_conv_state(own.layer_idx, state_idx=0)
            state = cache_params.get_recurrent_state(own.layer_idx, state_idx=0)
            recording = cache_params.is_recording_past(own.layer_idx)
            if held is not None and state is not None and not recording and _served(own, hidden_states, held, state):
                return _one_token(own, hidden_states, held, state)
        return super().__call__(hidden_states, cache_params, attention_mask, **kwargs)


def _served(own: Any, x: Tensor, held: Tensor, state: Tensor) -> bool:
    tensors = x, held, state, own.conv1d.weight, own.A_log, own.dt_bias, own.D, own.in_proj.weight
    if not available() or own.activation not in ("silu", "swish") or hasattr(own.conv1d, "_hf_hook"):
        return False
    wide = all(y.dtype is torch.float32 for y in tensors)
    return wide and eligible(*tensors) and state.is_contiguous() and held.stride(2) == 1


def _one_token(own: Any, hidden_states: Tensor, held: Tensor, state: Tensor) -> Tensor:
    """(B, 1, width) -> (B, 1, width); the states move on by one."""
    batch = hidden_states.shape[0]
    rows = own.in_proj(hidden_states).squeeze(1)
    gate, mixed, dt = rows.split([own.intermediate_size, own.conv_dim, own.num_heads], -1)
    weight, bias = own.conv1d.weight.squeeze(1), own.conv1d.bias
    mixed = mixer.conv_step(mixed, held, weight.contiguous(), bias, silu=True)
    shared = own.n_groups * own.ssm_state_size
    x, B, C = mixed.split([own.intermediate_size, shared, shared], -1)
    out = mixer.ssd_step(
        state,
        x.view(batch, own.num_heads, own.head_dim),
        dt,
        -own.A_log.exp(),
        B.view(batch, own.n_groups, own.ssm_state_size),
        C.view(batch, own.n_groups, own.ssm_state_size),
        own.D,
        None,
        own.dt_bias,
        softplus=True,
    )
    out = own.norm(out.view(batch, 1, -1), gate.unsqueeze(1))
    return own.out_proj(out)
