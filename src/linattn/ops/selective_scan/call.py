"""One call of the selective scan, described once: what every form of it takes."""

from typing import NamedTuple

import torch
from torch import Tensor


class SelectiveScanCall(NamedTuple):
    """Canonical tensors, checked by linattn.functional. The c channels form g groups of neighbours that share B and C.

    Attributes:
        u, delta: inputs and step sizes (b, c, t).
        A: decay rates (c, n).
        B, C: (b, g, n, t).
        D: (c), the weight of u itself in the output; None: 0.
        z: output gate (b, c, t); None: 1.
        delta_bias: (c), added to delta.
        state: (b, c, n) before the first token; None: zeros.
        delta_softplus: the step sizes are the softplus of delta + delta_bias.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    state: Tensor | None = None
    delta_softplus: bool = False

    def to(self, dtype: torch.dtype) -> "SelectiveScanCall":
        """The same call with all tensors in one dtype."""
        u, delta, A, B, C = (x.to(dtype) for x in self[:5])
        D, z, delta_bias, state = (None if x is None else x.to(dtype) for x in self[5:9])
        return SelectiveScanCall(u, delta, A, B, C, D, z, delta_bias, state, self.delta_softplus)
