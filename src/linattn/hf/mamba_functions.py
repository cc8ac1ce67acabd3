"""The selective scan and the causal convolution under the names and arguments that transformers' models call them by.

Each takes the place of the function of that name in mamba_ssm or causal_conv1d. The updates write the new state over the old
one, as those do.
"""

from typing import Literal

import torch
from torch import Tensor

from ..functional.causal_conv1d import causal_conv1d
from ..functional.selective_scan import selective_scan
from ..states import ConvState, ScanState


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """mamba_ssm's: out (batch, channels, tokens), with return_last_state also the state (batch, channels, n)."""
    out, state = selective_scan(
        u, delta, A, B, C, D=D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus, return_state=True
    )
    return (out, state.h) if return_last_state else out


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: object,
) -> Tensor:
    """mamba_ssm's for one token of Mamba-1: state (batch, channels, n), x, dt and z (batch, channels), B, C (batch, n)."""
    u, delta, b, c = (y.unsqueeze(-1) for y in (x, dt, B, C))
    out, new = selective_scan(
        *(u, delta, A, b, c),
        D=D,
        z=None if z is None else z.unsqueeze(-1),
        delta_bias=dt_bias,
        delta_softplus=dt_softplus,
        state=ScanState("selective_scan", state),
        return_state=True,
    )
    state.copy_(new.h)
    return out.squeeze(-1)


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: object
) -> Tensor:
    """causal_conv1d's. seq_idx (batch, tokens), the number of each token's sequence, is not supported."""
    if options.get("seq_idx") is not None:
        raise ValueError(
            "seq_idx is not supported: pass the bounds of the sequences to linattn.causal_conv1d as cu_seqlens."
        )
    return causal_conv1d(x, weight, bias, activation=_activation(activation))


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """causal_conv1d's: x (batch, channels) or (batch, channels, tokens), conv_state (batch, channels, width - 1 or more)."""
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    kept = weight.shape[1] - 1
    state = ConvState("causal_conv1d", conv_state[..., conv_state.shape[-1] - kept :])
    out = causal_conv1d(tokens, weight, bias, activation=_activation(activation), state=state)
    conv_state.copy_(torch.cat([conv_state, tokens.to(conv_state.dtype)], -1)[..., -conv_state.shape[-1] :])
    return out.squeeze(-1) if x.dim() == 2 else out


def _activation(name: str | None) -> Literal["silu"] | None:
    if name not in (None, "silu", "swish"):
        raise ValueError(f'activation must be None, "silu" or "swish", got {name!r}.')
    return None if name is None else "silu"
