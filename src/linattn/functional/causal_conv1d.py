"""linattn.causal_conv1d: the short depthwise convolution in front of most linear-attention layers."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, overload

from torch import Tensor

from ..engines import EngineName
from ..engines.native import causal_conv1d as native
from ..engines.plan import rule_refusal, serves_natively
from ..kernels.base import compute_dtype
from ..ops.causal_conv1d import shifts
from ..ops.causal_conv1d.call import CausalConv1dCall
from ..ops.packing import read_packing
from ..states import ConvState, State
from . import routing
from .checks import check_mask
from .scan_checks import check_device, check_shape, check_tensor, check_tokens, read_state

LEAST_WIDTH, MOST_WIDTH = 2, 8
Activation = Literal["silu"] | None


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    state: State | None = None,
    return_state: Literal[False] = False,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    engine: EngineName = "auto",
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    state: State | None = None,
    return_state: Literal[True],
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    engine: EngineName = "auto",
) -> tuple[Tensor, ConvState]: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    state: State | None = None,
    return_state: bool,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, ConvState]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    state: State | None = None,
    return_state: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, ConvState]:
    """Depthwise causal convolution along the tokens: out_t = act(bias + sum_i weight_i x_(t - width + 1 + i)).

    >>> import torch, linattn
    >>> x, weight, bias = torch.randn(2, 32, 100), torch.randn(32, 4), torch.randn(32)
    >>> whole = linattn.causal_conv1d(x, weight, bias, activation="silu")
    >>> whole.shape
    torch.Size([2, 32, 100])

    One token at a time, as in generation:

    >>> first, state = linattn.causal_conv1d(x[..., :99], weight, bias, activation="silu", return_state=True)
    >>> last, state = linattn.causal_conv1d(x[..., 99:], weight, bias, activation="silu", state=state, return_state=True)
    >>> torch.allclose(torch.cat([first, last], -1), whole, atol=1e-5)
    True

    Args:
        x: (..., channels, tokens). A transposed view of (..., tokens, channels) is not copied.
        weight: (channels, width), width 2 to 8. The last column multiplies the token itself.
        bias: (channels).
        activation: None or "silu".
        state: the state of an earlier call, to continue from. Without one, the input is zero-padded.
        return_state: also return the state: the last width - 1 inputs.
        key_mask: (batch, tokens) bool, True = a real token. Masked tokens are skipped: the tokens around them become
            neighbours, they do not enter the state, and their own output is 0.
        cu_seqlens: bounds 0 = c_0 <= c_1 .. <= c_n of n sequences packed along the tokens, which do not see each other. States
            then have a batch dimension of n after the others.
        engine: "auto", "torch" or "native".

    Returns:
        (..., channels, tokens) of x's dtype; with return_state, that and a ConvState. Everything is computed in float32, or
        in float64 if x is float64.
    """
    if (router := routing.current()) is not None:
        more = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "return_state": return_state, "engine": engine}
        convolve: Callable[..., Tensor | tuple[Tensor, ConvState]] = router.function("causal_conv1d")
        return convolve(x, weight, bias, activation=activation, state=state, **more)
    x = check_tokens("x", x)
    *batch, channels, tokens = x.shape
    weight = _check_weight(weight, x)
    if bias is not None:
        bias = check_tensor("bias", bias, "(channels)")
        check_shape("bias", bias, "(channels)", (channels,))
    if activation not in (None, "silu"):
        raise ValueError(f'activation must be None or "silu", got {activation!r}.')
    b, carried = math.prod(batch), weight.shape[1] - 1
    mask = None
    if key_mask is not None:
        check_mask(key_mask, tuple(batch), tokens)
        mask = key_mask.expand(*batch, tokens).reshape(b, tokens)
    bounds = None if cu_seqlens is None else read_packing(cu_seqlens, tokens, tokens)[0].bounds
    state_batch = (*batch,) if bounds is None else (*batch, len(bounds) - 1)
    inputs = None
    if state is not None:
        shape = (*state_batch, channels, carried)
        inputs = read_state(state, ConvState, "inputs", "causal_conv1d", "(batch, channels, width - 1)", shape)
    check_device({"x": x, "weight": weight, "bias": bias, "key_mask": mask, "state": inputs})
    if x.dim() != 3:
        x = x.reshape(b, channels, tokens)
    if inputs is not None and inputs.dim() != 3:
        inputs = inputs.reshape(math.prod(state_batch), channels, carried)
    out, last = _run(engine, CausalConv1dCall(x, weight, bias, inputs, bounds, activation == "silu", mask))
    if len(batch) != 1:
        out = out.reshape(*batch, channels, tokens)
    if len(state_batch) != 1:
        last = last.reshape(*state_batch, channels, carried)
    return (out, ConvState("causal_conv1d", last)) if return_state else out


def _run(engine: str, call: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """By one of the engines."""
    if serves_natively(engine, rule_refusal(*call[:4], call.mask)) and call.x.numel():
        return native.causal_conv1d(call)
    out, last = shifts.causal_conv1d(call.to(compute_dtype(call.x.dtype)))
    return out.to(call.x.dtype), last.to(call.x.dtype)


def _check_weight(weight: object, x: Tensor) -> Tensor:
    found = check_tensor("weight", weight, "(channels, width)")
    channels = x.shape[-2]
    if found.dim() == 3 and found.shape[:2] == (channels, 1):
        raise ValueError(f"weight must be (channels, width), got {tuple(found.shape)}: pass conv.weight.squeeze(1).")
    if found.dim() != 2 or found.shape[0] != channels:
        raise ValueError(
            f"weight must be (channels, width) with {channels} channels, as x {tuple(x.shape)}; got {tuple(found.shape)}."
        )
    if not LEAST_WIDTH <= found.shape[1] <= MOST_WIDTH:
        raise ValueError(f"the width of weight must be {LEAST_WIDTH} to {MOST_WIDTH}, got {found.shape[1]}.")
    return found
