"""Mamba-1's selective scan and its update by one token under the arguments of mamba_ssm's functions."""

import itertools
from typing import Any

import torch
from torch import Tensor

from ...engines.native import mixer
from ...engines.native.plans import eligible
from ...engines.plan import rule_refusal
from ...functional.selective_scan import selective_scan
from ...states import ScanState
from .state_checks import check_state


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
    initial_state: Tensor | None = None,
    bounds: list[int] | None = None,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """mamba_ssm's: out (batch, channels, T), with return_last_state also the state (batch, channels, n).

    initial_state and bounds (of packed sequences) are ours: mamba_ssm has neither.
    """
    options: Any = {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus, "return_state": True}
    state = None if initial_state is None else ScanState("selective_scan", initial_state)
    if bounds is None:
        out, after = selective_scan(u, delta, A, B, C, z=z, state=state, **options)
        return (out, after.h) if return_last_state else out
    rows = []
    for begin, end in itertools.pairwise(bounds):
        part = [x[..., begin:end] for x in (u, delta, B, C)]
        gate = None if z is None else z[..., begin:end]
        out, after = selective_scan(part[0], part[1], A, part[2], part[3], z=gate, **options)
        rows.append(out)
    whole = torch.cat(rows, -1)
    return (whole, after.h) if return_last_state else whole


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
    """mamba_ssm's for one token: the new state is written over the old one.

    Mamba-1: state (batch, channels, n), x, dt and z (batch, channels), A (channels, n), B and C (batch, n). Mamba-2: one more
    dimension of heads before the channels, and one of groups in B and C: (batch, groups, n).
    """
    check_state(state, *x.shape)
    if state.dim() == 4:
        return _update_heads(state, x, dt, A, B, C, D, dt_bias, dt_softplus, z)
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
    state.copy_(new.h.detach())
    return out.squeeze(-1)


def _update_heads(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    z: Tensor | None,
) -> Tensor:
    """The update of Mamba-2: in place, or as one of Mamba-1 whose channels are those of all heads."""
    if (step := _same_for_all(state, x, dt, A, B, C, D, dt_bias, z)) is not None:
        return mixer.ssd_step(*step, softplus=dt_softplus).to(x.dtype)
    batch, channels = state.shape[0], state.shape[1] * state.shape[2]
    rows = state.view(batch, channels, state.shape[3])
    u, delta = (y.reshape(batch, channels, 1) for y in (x, dt))
    weights = [None if y is None else y.reshape(channels) for y in (D, dt_bias)]
    out, new = selective_scan(
        *(u, delta, A.reshape(channels, -1), B.unsqueeze(-1), C.unsqueeze(-1)),
        D=weights[0],
        z=None if z is None else z.reshape(batch, channels, 1),
        delta_bias=weights[1],
        delta_softplus=dt_softplus,
        state=ScanState("selective_scan", rows),
        return_state=True,
    )
    rows.copy_(new.h.detach())
    return out.reshape(x.shape)


def _same_for_all(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None,
) -> tuple[Any, ...] | None:
    """The arguments of mixer.ssd_step where a head's channels share one time step, decay and weight; else None.

    Models have one number for each head, and expand it.
    """
    given = [y for y in (state, x, dt, A, B, C, D, dt_bias, z) if y is not None]
    expanded = dt.stride(2) == 0 and A.stride()[1:] == (0, 0)
    expanded = expanded and all(y is None or y.stride(1) == 0 for y in (D, dt_bias))
    if not expanded or rule_refusal(*given) is not None or not eligible(*given):
        return None
    if state.dtype is not torch.float32 or not state.is_contiguous():
        return None
    wide = [y.float() for y in (x, dt[..., 0], A[:, 0, 0], B, C)]
    ends = [None if y is None else y.float() for y in (None if D is None else D[:, 0], z)]
    bias = None if dt_bias is None else dt_bias[:, 0].float()
    rows = [y if y.stride(-1) == 1 else y.contiguous() for y in (wide[0], wide[3], wide[4])]
    return state, rows[0], wide[1], wide[2].contiguous(), rows[1], rows[2], *ends, bias
