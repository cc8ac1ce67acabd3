"""Mamba-2's layer: one token in three calls of the engine between the projections, a prompt in one."""

from typing import Any

import torch
from torch import Tensor

from ...engines.native import mixer
from ...engines.native.plans import eligible
from ...engines.native.scan_layer import ScanWeights, scan_layer
from ..projections import project_scaled
from .forward import EngineForward
from .norms import plain_options
from .one_pass import LEAST_TOKENS, STEP, WIDTHS, layer_past, served_alone, states_of

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
        own, alone = self.module, attention_mask is None and served_alone(self.module, kwargs)
        sizes = hidden_states.shape[0], own.num_heads, own.head_dim, own.ssm_state_size
        states = states_of(own, cache_params, *sizes) if alone else None
        if states is not None and not hasattr(own.conv1d, "_hf_hook"):
            if hidden_states.shape[1] >= LEAST_TOKENS and _one_pass(own, hidden_states, states):
                if (rows := _float_rows(own, hidden_states)) is not None:
                    return _prompt(own, rows, cache_params, states)
            elif hidden_states.shape[1] == 1 and states and _served(own, hidden_states, *states):
                recording = cache_params.is_recording_past(own.layer_idx)
                if not recording and (rows := _float_rows(own, hidden_states)) is not None:
                    return _one_token(own, rows.squeeze(1), *states)
        return super().__call__(hidden_states, cache_params, attention_mask, **kwargs)


def _float_rows(own: Any, x: Tensor) -> Tensor | None:
    """What the input projection makes of x; None if that is not for native code, as with a projection of another dtype."""
    rows: Tensor = own.in_proj(x)
    return rows if rows.dtype is torch.float32 and rows.stride(-1) == 1 and eligible(rows) else None


def _one_pass(own: Any, x: Tensor, states: list[Tensor]) -> bool:
    """Whether convolution and scan are one native call: a prompt or a part of one, in float32."""
    weights = own.conv1d.weight, own.A_log, own.dt_bias, own.D, own.norm.weight
    given = [x, *weights, *states, *([] if own.conv1d.bias is None else [own.conv1d.bias])]
    shaped = own.head_dim % STEP == 0 and own.ssm_state_size % STEP == 0 and own.conv_kernel_size in WIDTHS
    usual = (
        own.activation in ("silu", "swish") and tuple(own.time_step_limit) == (0.0, float("inf")) and not own.training
    )
    return shaped and usual and all(y.dtype is torch.float32 for y in given) and eligible(*given)


def _prompt(own: Any, rows: Tensor, cache: Any, states: list[Tensor]) -> Tensor:
    """What the input projection made, (B, T, ..) -> (B, T, width); the cache, if there is one, gets the states."""
    batch, tokens, _ = rows.shape
    gate, mixed, dt = rows.split([own.intermediate_size, own.conv_dim, own.num_heads], -1)
    past = layer_past(states, own.conv_kernel_size, transposed=True)  # before the cache moves on
    if cache is not None:
        cache.update_conv_state(mixed.transpose(1, 2), own.layer_idx, conv_kernel_size=own.conv_kernel_size)
    weights = ScanWeights(
        own.conv1d.weight.squeeze(1).t().contiguous(),
        None if own.conv1d.bias is None else own.conv1d.bias.contiguous(),
        -own.A_log.exp(),
        own.dt_bias.contiguous(),
        own.D.contiguous(),
    )
    scaled = project_scaled(own.out_proj, batch * tokens) if _whole_rows(own.norm) else None
    gates = gate.unflatten(-1, (own.num_heads, own.head_dim)) if scaled else None
    out, last, squares = scan_layer(mixed, dt, gates, weights, own.num_heads, own.n_groups, own.ssm_state_size, past)
    if cache is not None:
        cache.update_recurrent_state(last.mT.contiguous(), layer_idx=own.layer_idx)
    if scaled is None or squares is None:
        return own.out_proj(own.norm(out.flatten(2), gate))
    mean = squares.sum(1) / own.intermediate_size
    return scaled(out.flatten(2), (mean + own.norm.variance_epsilon).rsqrt(), own.norm.weight)


def _whole_rows(norm: Any) -> bool:
    """Whether the norm is over all heads and after the gate: then it is a factor of each row of the output projection."""
    options = plain_options(norm)
    return options is not None and options.get("groups") == 1 and options.get("gate_first", False)


def _served(own: Any, x: Tensor, held: Tensor, state: Tensor) -> bool:
    tensors = x, held, state, own.conv1d.weight, own.A_log, own.dt_bias, own.D
    if own.activation not in ("silu", "swish"):
        return False
    wide = all(y.dtype is torch.float32 for y in tensors)
    whole = state.is_contiguous() and held.stride(2) == 1 and held.shape[2] >= own.conv_kernel_size - 1
    return wide and eligible(*tensors) and whole


def _one_token(own: Any, rows: Tensor, held: Tensor, state: Tensor) -> Tensor:
    """What the input projection made, (B, ..) -> (B, 1, width); the states move on by one."""
    batch = rows.shape[0]
    gate, mixed, dt = rows.split([own.intermediate_size, own.conv_dim, own.num_heads], -1)
    weight, bias = own.conv1d.weight.squeeze(1), own.conv1d.bias
    bias = None if bias is None else bias.contiguous()
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
        own.D.contiguous(),
        None,
        own.dt_bias.contiguous(),
        softplus=True,
    )
    out = own.norm(out.view(batch, 1, -1), gate.unsqueeze(1))
    return own.out_proj(out)
