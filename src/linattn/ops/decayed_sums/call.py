"""One call of decayed sums, described once: what every form of the rule takes."""

from typing import NamedTuple

from torch import Tensor


class DecayedSumsCall(NamedTuple):
    """Canonical tensors, checked by linattn.functional: those of linattn.ops.delta_rule.call without beta.

    query (B, Hq, T, D), key (B, Hk, T, D), value (B, H, T, M), log_decay (B, H, T) or (B, H, T, D), mask (B, T), state
    (B * n, H, D, M) for n sequences with the bounds cu_seqlens. scale multiplies the output.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: list[int] | None = None
    state: Tensor | None = None
    scale: float = 1.0
