"""The selective scan by chunks of tokens, in plain torch: any device, memory linear in the tokens.

The states inside of a chunk come from a scan of log2(chunk) steps over pairs (decay, state): products of decays and sums, so
that nothing can overflow. Training keeps the states between chunks and computes the rest again.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .call import SelectiveScanCall

BUDGET = 2**21  # numbers in a chunk's states: 8 MiB of float32
COMPILED_BUDGET = 2**25  # torch.compile unrolls the loop over chunks, so it gets fewer of them
LONGEST = 512  # tokens in a chunk


def selective_scan(call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    """Tensors of one dtype -> out (b, c, t), last state (b, c, n)."""
    u, delta, A, B, C, D, z, delta_bias, state, delta_softplus = call
    b, c, t = u.shape
    h = u.new_zeros(b, c, A.shape[1]) if state is None else state
    if t == 0 or b == 0:
        return torch.zeros_like(u), h.clone()
    dt = delta if delta_bias is None else delta + delta_bias.unsqueeze(-1)
    dt = F.softplus(dt) if delta_softplus else dt
    length = _chunk_length(b * c * A.shape[1], t)
    step = _checkpointed_chunk if length < t and _needs_grad(u, delta, A, B, C, delta_bias, h) else _chunk
    rows = []
    for start in range(0, t, length):
        u_i, dt_i, B_i, C_i = (x[..., start : start + length] for x in (u, dt, B, C))
        row, h = step(u_i, dt_i, B_i, C_i, A, h)
        rows.append(row)
    out = torch.cat(rows, -1) if len(rows) > 1 else rows[0]
    out = out if D is None else out + D.unsqueeze(-1) * u
    return (out if z is None else out * F.silu(z)), h


def _chunk_length(per_token: int, tokens: int) -> int:
    budget = COMPILED_BUDGET if torch.compiler.is_compiling() else BUDGET
    length = 16
    while length < LONGEST and 2 * length * per_token <= budget:
        length *= 2
    return min(length, tokens)


def _needs_grad(*tensors: Tensor | None) -> bool:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False  # transforms know no checkpoints: everything is kept
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _checkpointed_chunk(u: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    pieces = (u, dt, B, C, A, state)
    found: tuple[Tensor, Tensor] = checkpoint(_chunk, *pieces, use_reentrant=False, preserve_rng_state=False)
    return found


def _chunk(u: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """u, dt (b, c, t), B, C (b, g, n, t), state (b, c, n) -> sum of C h (b, c, t), the state after these tokens."""
    b, c, t = u.shape
    g, n = B.shape[1:3]
    decay = (dt.unsqueeze(-1) * A.unsqueeze(1)).exp()  # (b, c, t, n)
    mixed = B.mT.unsqueeze(2)  # (b, g, 1, t, n)
    added = ((dt * u).view(b, g, c // g, t, 1) * mixed).reshape(b, c, t, n)
    first = added[:, :, :1] + decay[:, :, :1] * state.unsqueeze(2)
    h = _scan(decay, torch.cat([first, added[:, :, 1:]], 2))
    rows = (h.view(b, g, c // g, t, n) * C.mT.unsqueeze(2)).sum(-1)
    return rows.reshape(b, c, t), h[:, :, -1]


def _scan(decay: Tensor, added: Tensor) -> Tensor:
    """h_t = decay_t h_(t-1) + added_t along dim 2, in doubling steps."""
    shift = 1
    while shift < decay.shape[2]:
        later = decay[:, :, shift:]
        added = torch.cat([added[:, :, :shift], added[:, :, shift:] + later * added[:, :, :-shift]], 2)
        decay = torch.cat([decay[:, :, :shift], later * decay[:, :, :-shift]], 2)
        shift *= 2
    return added
