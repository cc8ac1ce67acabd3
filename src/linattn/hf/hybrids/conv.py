"""The short causal convolution and its update under the arguments of causal_conv1d's functions."""

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ...engines.native import causal_conv1d as native
from ...engines.native import mixer
from ...engines.native.plans import eligible
from ...engines.plan import rule_refusal
from ...functional import routing
from ...kernels.base import compute_dtype
from ...ops.causal_conv1d import shifts
from ...ops.causal_conv1d.call import CausalConv1dCall
from .packing import packed_bounds
from .state_checks import check_state

SILU = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: object,
) -> Tensor:
    """causal_conv1d's: x (batch, channels, T), weight (channels, width) -> (batch, channels, T)."""
    packed = cu_seqlens if cu_seqlens is not None else cu_seq_lens_q
    return _convolve(x, weight, bias, activation, packed_bounds(seq_idx, packed, x.shape[2]), None)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """causal_conv1d's: x (batch, channels) or (batch, channels, T), conv_state (batch, channels, width - 1 or more), which
    then holds the last inputs."""
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    check_state(conv_state, *tokens.shape[:2])
    _check_held(conv_state, weight.shape[1] - 1)
    if _one_step(tokens, conv_state, weight, bias):
        wide = weight.float().contiguous(), None if bias is None else bias.float().contiguous()
        out = mixer.conv_step(tokens[..., 0], conv_state, *wide, silu=activation in ("silu", "swish"))
        out = out if activation in SILU else ACT2FN[activation](out)
        return out if x.dim() == 2 else out.unsqueeze(-1)
    state = conv_state[..., conv_state.shape[-1] - weight.shape[1] + 1 :].clone()  # autograd may keep it
    out = _convolve(tokens, weight, bias, activation, None, state)
    with torch.no_grad():
        conv_state.copy_(torch.cat([conv_state, tokens.to(conv_state.dtype)], -1)[..., -conv_state.shape[-1] :])
    return out.squeeze(-1) if x.dim() == 2 else out


def _check_held(conv_state: Tensor, needed: int) -> None:
    """Raises for a state that is shorter than the convolution reaches back: native code would read beyond it."""
    if conv_state.shape[-1] < needed:
        raise ValueError(
            f"the cache holds {conv_state.shape[-1]} inputs of a convolution that reaches back {needed}: it recorded a shorter "
            f"prompt. Give it {needed} tokens or more at first, or no activate_past_recording()."
        )


def _one_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the native update by one token serves the call."""
    if x.shape[2] != 1 or state.dtype is not x.dtype or state.stride(2) != 1:
        return False
    given = (x, state, weight) if bias is None else (x, state, weight, bias)
    return rule_refusal(*given) is None and eligible(*given) and state.shape[2] > 0


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    bounds: list[int] | None,
    state: Tensor | None,
) -> Tensor:
    silu = activation in ("silu", "swish")
    if (router := routing.current()) is not None:  # over shards: without a cache, see hf.sharding
        out = router.function("causal_conv1d")(x, weight, bias, activation="silu" if silu else None, cu_seqlens=bounds)
        return out if activation in SILU else ACT2FN[activation](out)
    narrow = 2 <= weight.shape[1] <= native.MOST_WIDTH
    call = CausalConv1dCall(x, weight, bias, state, bounds, silu)
    if narrow and rule_refusal(x, weight, bias, state) is None and x.numel():
        out, _ = native.causal_conv1d(call)
    else:
        out = shifts.causal_conv1d(call.to(compute_dtype(x.dtype)))[0].to(x.dtype)
    return out if activation in SILU else ACT2FN[activation](out)
