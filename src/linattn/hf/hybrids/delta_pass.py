"""What is between the projections of a layer of the delta rule as one native call, for all families: of a prompt, or of one
token after others."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engines.native.delta_layer import LayerWeights, Rows, StepWeights, delta_layer, delta_layer_step
from ...engines.native.plans import eligible
from .norms import plain_options
from .one_pass import LEAST_TOKENS, STEP, WIDTHS, layer_past, served_alone, states_of


class Projections(NamedTuple):
    """mixed (B, T, channels): queries, keys and values, or these three; z (B, T, H, M), or (B, T, key heads, H / key heads, M):
    gates of the norm; b (B, T, key heads, H / key heads); a like b, or with a last dimension D for a decay of each channel."""

    mixed: Rows
    z: Tensor
    b: Tensor
    a: Tensor

    @property
    def rows(self) -> tuple[Tensor, ...]:
        return (self.mixed,) if isinstance(self.mixed, Tensor) else self.mixed


class DeltaParts(NamedTuple):
    """What a layer is made of. layer: with a conv1d, activation, layer_idx and conv_kernel_size. A_log (H) and dt_bias (H) or
    (H, D): log decay = -exp(A_log) softplus(a + dt_bias), or bound sigmoid(exp(A_log) (a + dt_bias)) where bound is not 0."""

    layer: Any
    norm: Any
    A_log: Tensor
    dt_bias: Tensor
    key_heads: int
    heads: int
    dim: int
    value_dim: int
    bound: float = 0.0


def find_states(parts: DeltaParts, cache: Any, batch: int, kwargs: dict[str, Any]) -> list[Tensor] | None:
    """What states_of finds; None where the layer cannot be one native call."""
    if not served_alone(parts.layer, kwargs):
        return None
    return states_of(parts.layer, cache, batch, parts.heads, parts.dim, parts.value_dim)


def serves(parts: DeltaParts, tokens: int, states: list[Tensor] | None, cache: Any) -> bool:
    """Whether one native call serves so many tokens, as far as weights and states tell: in float32, a prompt or a part of one,
    or one token after others."""
    if states is None or parts.layer.activation not in ("silu", "swish") or plain_options(parts.norm) is None:
        return False
    conv = parts.layer.conv1d
    filters, bias = conv.weight, conv.bias
    weights = [filters, parts.A_log, parts.dt_bias, parts.norm.weight, *([] if bias is None else [bias])]
    if tokens != 1:
        shaped = parts.dim % STEP == 0 and parts.value_dim % STEP == 0 and filters.shape[2] in WIDTHS
        if not shaped or tokens < LEAST_TOKENS or bias is not None:
            return False
    elif not states or cache.is_recording_past(parts.layer.layer_idx):
        return False
    else:
        held, state = states
        if not state.is_contiguous() or not all(x.is_contiguous() for x in weights):
            return False
        if held.stride(2) != 1 or held.shape[2] < filters.shape[2] - 1:
            return False
    return _plain_floats(*weights, *states)


def run(parts: DeltaParts, found: Projections, states: list[Tensor], cache: Any) -> Tensor | None:
    """The inputs of the output projection, (B, T, H M), by the call that serves(..) spoke of; the cache moves on.

    None where the call does not serve what the projections left.
    """
    rows = found.rows
    if not _plain_floats(*rows, found.z, found.b, found.a):
        return None
    strides = rows[0].stride()
    if strides[2] != 1 or found.z.stride(-1) != 1 or (found.a.dim() == 5 and found.a.stride(4) != 1):
        return None
    if any(x.stride() != strides for x in rows[1:]):
        return None
    if rows[0].shape[1] == 1:
        return _step(parts, found, cache, *states)
    return _prompt(parts, found, cache, states)


def _plain_floats(*given: Tensor) -> bool:
    return all(x.dtype is torch.float32 for x in given) and eligible(*given)


def _step(parts: DeltaParts, found: Projections, cache: Any, held: Tensor, state: Tensor) -> Tensor | None:
    gate = found.z[:, 0].flatten(1)
    if gate.stride(1) != 1:
        return None
    conv, norm, options = parts.layer.conv1d, parts.norm, plain_options(parts.norm) or {}
    weights = StepWeights(
        conv.weight.squeeze(1),
        conv.bias,
        parts.A_log,
        parts.dt_bias,
        norm.weight,
        norm.variance_epsilon,
        parts.bound,
        options["sigmoid"],
    )
    mixed: Any = [x[:, 0] for x in found.rows]
    mixed = mixed[0] if len(mixed) == 1 else tuple(mixed)
    out = delta_layer_step(mixed, found.b[:, 0], found.a[:, 0], gate, weights, parts.key_heads, held, state)
    cache.update_recurrent_state(state, parts.layer.layer_idx)
    return out.unsqueeze(1)


def _prompt(parts: DeltaParts, found: Projections, cache: Any, states: list[Tensor]) -> Tensor:
    layer, norm, options = parts.layer, parts.norm, plain_options(parts.norm) or {}
    filters = layer.conv1d.weight.squeeze(1).t().contiguous()
    z = found.z.reshape(*found.z.shape[:2], parts.heads, parts.value_dim)
    past = layer_past(states, filters.shape[0])  # before the cache moves on
    if cache is not None:
        inputs = found.rows
        if not cache.is_recording_past(layer.layer_idx):  # only the last ones are kept
            inputs = tuple(x[:, -layer.conv_kernel_size :] for x in inputs)
        inputs_held = torch.cat(inputs, -1).transpose(1, 2)
        cache.update_conv_state(inputs_held, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
    weights = LayerWeights(
        filters,
        -parts.A_log.exp(),
        parts.dt_bias.contiguous(),
        norm.weight.contiguous(),
        norm.variance_epsilon,
        parts.bound,
        options["sigmoid"],
    )
    b, a = found.b.flatten(2), found.a.flatten(2, 3)
    out, last = delta_layer(found.mixed, b, a, z, weights, parts.key_heads, past)
    if cache is not None:
        cache.update_recurrent_state(last, layer.layer_idx)
    return out.flatten(2)
