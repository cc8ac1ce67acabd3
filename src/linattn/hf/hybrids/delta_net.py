"""Qwen's gated delta net with fewer copies than its modelling file makes: key heads are shared instead of repeated, gates are
read where the projection left them, and what is between the projections is one native call where it can be."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engines.native.delta_layer import LayerWeights, StepWeights, delta_layer, delta_layer_step
from ...engines.native.plans import eligible
from ..projections import project_in_order
from .conv import causal_conv1d_fn, causal_conv1d_update
from .delta import delta_rule
from .forward import EngineForward
from .norms import plain_options
from .one_pass import LEAST_TOKENS, STEP, WIDTHS, layer_past, served_alone, states_of

CLASSES = {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"}


class Projections(NamedTuple):
    """mixed (B, T, channels): queries, keys and values; z (B, T, H, M), or (B, T, key heads, H / key heads, M): gates; b, a
    (B, T, key heads, H / key heads)."""

    mixed: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


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
        sizes = hidden_states.shape[0], own.num_v_heads, own.head_k_dim, own.head_v_dim
        states = states_of(own, cache_params, *sizes) if served_alone(own, kwargs) else None
        if states and hidden_states.shape[1] == 1:
            stepped = _step(own, found, cache_params, *states)
            if stepped is not None:
                return own.out_proj(stepped.unsqueeze(1))
        found = found._replace(b=found.b.flatten(2), a=found.a.flatten(2))
        if states is not None and _one_pass(own, found, states):
            return own.out_proj(_rule_and_norm(own, found, cache_params, states).flatten(2))
        state = None if cache_params is None else cache_params.get_recurrent_state(own.layer_idx, state_idx=0)
        mixed = _convolve(own, found.mixed.transpose(1, 2), cache_params, kwargs).transpose(1, 2)
        query, key, value = mixed.split([own.key_dim, own.key_dim, own.value_dim], -1)
        B, T, _ = hidden_states.shape
        out, last = delta_rule(
            query.unflatten(-1, (own.num_k_heads, own.head_k_dim)),
            key.unflatten(-1, (own.num_k_heads, own.head_k_dim)),
            value.unflatten(-1, (own.num_v_heads, own.head_v_dim)),
            g=-own.A_log.float().exp() * F.softplus(found.a.float() + own.dt_bias),
            beta=found.b.sigmoid(),
            initial_state=state,
            output_final_state=cache_params is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
        )
        if cache_params is not None:
            cache_params.update_recurrent_state(last, own.layer_idx)
        out = own.norm(out.view(found.z.shape), found.z)
        return own.out_proj(out.reshape(B, T, -1))


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


def _step(own: Any, found: Projections, cache: Any, held: Tensor, state: Tensor) -> Tensor | None:
    """The inputs of the output projection, (B, H M), for one token after others, by one native call; the cache moves on.

    None where that call does not serve it.
    """
    if cache.is_recording_past(own.layer_idx):
        return None
    mixed, z, b, a = (x[:, 0] for x in found)
    weight, bias = own.conv1d.weight, own.conv1d.bias
    weights = StepWeights(weight, bias, own.A_log, own.dt_bias, own.norm.weight, own.norm.variance_epsilon)
    given = [*found, *[x for x in weights[:5] if x is not None], held, state]
    options = plain_options(own.norm)
    plain = options is not None and not options["sigmoid"] and own.activation in ("silu", "swish")
    if not plain or not all(x.dtype is torch.float32 for x in given) or not eligible(*given):
        return None
    whole = [state, *[x for x in weights[:5] if x is not None], z[0]]
    if not all(x.is_contiguous() for x in whole) or held.stride(2) != 1 or mixed.stride(1) != 1:
        return None
    if b.stride() != a.stride() or held.shape[2] < weight.shape[2] - 1:
        return None
    weights = weights._replace(filters=weight.squeeze(1))
    out = delta_layer_step(mixed, b, a, z.flatten(1), weights, own.num_k_heads, held, state)
    cache.update_recurrent_state(state, own.layer_idx)
    return out


def _one_pass(own: Any, found: Projections, states: list[Tensor]) -> bool:
    """Whether convolution, rule and norm are one native call: a prompt or a part of one, in float32."""
    if found.mixed.shape[1] < LEAST_TOKENS or own.conv1d.bias is not None:
        return False
    given = [*found, own.conv1d.weight, own.A_log, own.dt_bias, own.norm.weight, *states]
    shaped = own.head_k_dim % STEP == 0 and own.head_v_dim % STEP == 0 and own.conv_kernel_size in WIDTHS
    plain = shaped and own.activation in ("silu", "swish") and found.mixed.stride(2) == found.z.stride(-1) == 1
    options = plain_options(own.norm)
    normed = options is not None and not options["sigmoid"]
    return plain and normed and all(x.dtype is torch.float32 for x in given) and eligible(*given)


def _rule_and_norm(own: Any, found: Projections, cache: Any, states: list[Tensor]) -> Tensor:
    """The inputs of the output projection, (B, T, H, M); the cache moves on."""
    z = found.z.reshape(*found.z.shape[:2], own.num_v_heads, own.head_v_dim)
    past = layer_past(states, own.conv_kernel_size)  # before the cache moves on
    if cache is not None:
        cache.update_conv_state(found.mixed.transpose(1, 2), own.layer_idx, conv_kernel_size=own.conv_kernel_size)
    weights = LayerWeights(
        own.conv1d.weight.squeeze(1).t().contiguous(),
        -own.A_log.exp(),
        own.dt_bias.contiguous(),
        own.norm.weight.contiguous(),
        own.norm.variance_epsilon,
    )
    out, last = delta_layer(found.mixed, found.b, found.a, z, weights, own.num_k_heads, past)
    if cache is not None:
        cache.update_recurrent_state(last, own.layer_idx)
    return out


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
