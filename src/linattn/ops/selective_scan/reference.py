"""The selective scan token by token: the definition."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .call import SelectiveScanCall


def selective_scan(call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    """out (b, c, t) and last state (b, c, n), in the inputs' dtype."""
    u, delta, A, B, C, D, z, delta_bias, state, delta_softplus = call
    b, c, _ = u.shape
    h = u.new_zeros(b, c, A.shape[1]) if state is None else state
    dt = delta if delta_bias is None else delta + delta_bias.unsqueeze(-1)
    dt = F.softplus(dt) if delta_softplus else dt
    B, C = (x.repeat_interleave(c // x.shape[1], 1) for x in (B, C))  # (b, c, n, t)
    rows = []
    for u_t, dt_t, B_t, C_t in zip(*(x.unbind(-1) for x in (u, dt, B, C)), strict=True):
        step = dt_t.unsqueeze(-1)
        h = torch.exp(step * A) * h + step * B_t * u_t.unsqueeze(-1)
        rows.append((C_t * h).sum(-1))
    out = torch.stack(rows, -1) if rows else torch.zeros_like(u)
    out = out if D is None else out + D.unsqueeze(-1) * u
    return (out if z is None else out * F.silu(z)), h
