"""Qwen's gated delta net with fewer copies than its modelling file makes: key heads are shared instead of repeated, gates are
read where the projection left them, and what is between the projections is one native call where it can be."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..projections import project_in_order
from .conv import causal_conv1d_fn, causal_conv1d_update
from .delta import delta_rule
from .delta_pass import DeltaParts, Projections, find_states, run, serves
from .forward import EngineForward

CLASSES = {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"}


class DeltaNetForward(EngineForward):
    """Stands in for `forward` on one gated delta net of Qwen3-Next, Qwen3.5 or Qwen4-Exp."""

    def __call__(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """(B, T, width) -> (B, T, width)."""
        own = self.module
        if not hidden_states.is_cpu or hasattr(own.conv1d, "_hf_hook"):
            return super().__call__(hidden_states, cache_params, attention_mask, **kwargs)
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        found = _project(own, hidden_states)
        parts = _parts(own)
        states = find_states(parts, cache_params, hidden_states.shape[0], kwargs)
        if states is not None and serves(parts, hidden_states.shape[1], states, cache_params):
            out = run(parts, found, states, cache_params)
            if out is not None:
                return own.out_proj(out)
        state = None if cache_params is None else cache_params.get_recurrent_state(own.layer_idx, state_idx=0)
        mixed = _convolve(own, found.rows[0].transpose(1, 2), cache_params, kwargs).transpose(1, 2)
        query, key, value = mixed.split([own.key_dim, own.key_dim, own.value_dim], -1)
        B, T, _ = hidden_states.shape
        out, last = delta_rule(
            query.unflatten(-1, (own.num_k_heads, own.head_k_dim)),
            key.unflatten(-1, (own.num_k_heads, own.head_k_dim)),
            value.unflatten(-1, (own.num_v_heads, own.head_v_dim)),
            g=-own.A_log.float().exp() * F.softplus(found.a.flatten(2).float() + own.dt_bias),
            beta=found.b.flatten(2).sigmoid(),
            initial_state=state,
            output_final_state=cache_params is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
        )
        if cache_params is not None:
            cache_params.update_recurrent_state(last, own.layer_idx)
        out = own.norm(out.view(found.z.shape), found.z)
        return own.out_proj(out.reshape(B, T, -1))


def _parts(own: Any) -> DeltaParts:
    sizes = own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim
    return DeltaParts(own, own.norm, own.A_log, own.dt_bias, *sizes)


def _project(own: Any, hidden_states: Tensor) -> Projections:
    heads, shared = own.num_k_heads, own.num_v_heads // own.num_k_heads
    if hasattr(own, "in_proj_qkvz"):
        mixed, z = _project_grouped(own, hidden_states)
        b, a = own.in_proj_ba(hidden_states).unflatten(-1, (heads, -1)).split([shared, shared], -1)
    else:
        mixed, z = own.in_proj_qkv(hidden_states), own.in_proj_z(hidden_states)
        z = z.unflatten(-1, (own.num_v_heads, own.head_v_dim))
        b, a = (linear(hidden_states).unflatten(-1, (heads, shared)) for linear in (own.in_proj_b, own.in_proj_a))
    return Projections(mixed, z, b, a)


def _project_grouped(own: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3-Next: each key head has its query, key, values and gates side by side; here all queries come first, and so on."""
    heads, values = own.num_k_heads, own.value_dim // own.num_k_heads
    sizes = (own.head_k_dim, own.head_k_dim, values, values)
    ordered = project_in_order(own.in_proj_qkvz, hidden_states, lambda: _parts_first(heads, sizes))
    if ordered is not None:
        mixed, z = ordered.split([2 * own.key_dim + own.value_dim, own.value_dim], -1)
        return mixed, z.unflatten(-1, (own.num_v_heads, own.head_v_dim))
    query, key, value, z = own.in_proj_qkvz(hidden_states).unflatten(-1, (heads, -1)).split(sizes, -1)
    mixed = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], -1)
    return mixed, z.unflatten(-1, (-1, own.head_v_dim))


@functools.lru_cache(64)
def _parts_first(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Where the outputs of (heads, parts of these sizes) are, in the order (parts, heads)."""
    with torch.inference_mode(False):  # it is kept for calls outside as well
        places = torch.arange(heads * sum(sizes), device="cpu").view(heads, -1)
        return torch.cat([part.flatten() for part in places.split(list(sizes), -1)])


def _convolve(own: Any, mixed: Tensor, cache: Any, kwargs: dict[str, Any]) -> Tensor:
    """(B, channels, T) -> (B, channels, T), with the inputs that the cache holds."""
    weight, tokens = own.conv1d.weight.squeeze(1), mixed.shape[2]
    held = None if cache is None else cache.get_conv_state(own.layer_idx, state_idx=0)
    if held is not None and tokens == 1 and not cache.is_recording_past(own.layer_idx):
        return causal_conv1d_update(mixed, held, weight, own.conv1d.bias, own.activation)
    if cache is not None:
        mixed = cache.update_conv_state(mixed, own.layer_idx, conv_kernel_size=own.conv_kernel_size)
    packed = {name: kwargs.get(name) for name in ("seq_idx", "cu_seq_lens_q")}
    return causal_conv1d_fn(mixed, weight, own.conv1d.bias, own.activation, **packed)[:, :, -tokens:]
