"""Decay and gates of the sums."""

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_INPUT = 2.0**-60  # in place of 1 - gate = 0: less than any rounding, and the gradient of the gate stays right

# Logarithms below count as this, which leaves nothing of any sum: added up, larger ones would swallow what follows them.
STRONGEST_DECAY = -1e6


class Forgetting(NamedTuple):
    """Logarithms in float64, (..., kv heads, tokens) each.

    log_decay: of what multiplies the sums before a token is added.
    log_input: of what multiplies the token itself.
    writes: False for tokens that a gate of exactly 1 keeps out; None if there are none.
    """

    log_decay: Tensor | None = None
    log_input: Tensor | None = None
    writes: Tensor | None = None


def forgetting(log_decay: Tensor | None, gate: Tensor | None, key_mask: Tensor | None) -> Forgetting:
    """
    log_decay g:  S_t = exp(g_t) S_(t-1) + phi(k_t) v_t
    gate g:       S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t     (RFA-GATE)

    A masked token (key_mask (..., tokens), False) neither writes nor decays.
    """
    if log_decay is not None:
        return Forgetting(_hide(log_decay.double().clamp_min(STRONGEST_DECAY), key_mask))
    if gate is None:
        return Forgetting()
    gate = gate.double()
    share = 1 - gate
    closed = share.detach() == 0
    log_input = (share + closed * SMALLEST_INPUT).log()
    known = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    writes = None if known and gate.device.type != "meta" and not bool(closed.any()) else ~closed
    return Forgetting(_hide(gate.log(), key_mask), _hide(log_input, key_mask), writes)


def _hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    return x if key_mask is None else x.masked_fill(~key_mask.unsqueeze(-2), 0)
