"""One call of the delta rule, described once: what every form of it takes."""

from typing import NamedTuple

from torch import Tensor


class DeltaRuleCall(NamedTuple):
    """Canonical tensors, checked by linattn.functional; linattn.ops says how heads share them and what a mask hides.

    Attributes:
        query, key, value: (B, Hq, T, D), (B, Hk, T, D), (B, H, T, M), of one dtype.
        beta: (B, H, T), how far the value stored for a key moves to the new one.
        log_decay: None, (B, H, T) or (B, H, T, D), not above 0.
        mask: (B, T), True = use the token.
        cu_seqlens: bounds of n sequences in every batch entry; None: n = 1.
        state: (B * n, H, D, M) before the first token of each sequence; None: zeros.
        scale: multiplies the output.
        normalize_qk: queries and keys are divided by sqrt(sum of squares + 1e-6).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_decay: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: list[int] | None = None
    state: Tensor | None = None
    scale: float = 1.0
    normalize_qk: bool = False
