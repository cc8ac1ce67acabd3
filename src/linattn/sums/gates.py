"""Decay gates: how fast the sums forget."""

from torch import Tensor


def log_gates(decay: Tensor | None, gate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Logarithms of what multiplies the sums before a token is added, and of what multiplies the token.

    decay g:  S_t = g_t S_(t-1) + phi(k_t) v_t
    gate g:   S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t     (RFA-GATE)
    """
    if decay is not None:
        return decay.double().log(), None
    if gate is not None:
        return gate.double().log(), (-gate.double()).log1p()
    return None, None
