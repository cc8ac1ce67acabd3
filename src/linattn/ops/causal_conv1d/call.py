"""One call of the causal convolution, described once: what every form of it takes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CausalConv1dCall(NamedTuple):
    """Canonical tensors, checked by linattn.functional.

    Attributes:
        x: (b, c, t).
        weight: (c, w). The last column multiplies the token itself.
        bias: (c); None: 0.
        state: (b * n, c, w - 1), the inputs before the first token of each sequence; None: zeros.
        bounds: of n sequences in every batch entry; None: n = 1.
        silu: whether the output is silu of the convolution.
        mask: (b, t), True = use the token. Masked tokens are skipped: the tokens around them become neighbours, their output
            is 0, and they do not enter the state.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    state: Tensor | None = None
    bounds: Sequence[int] | None = None
    silu: bool = False
    mask: Tensor | None = None

    @property
    def ends(self) -> Sequence[int]:
        """The bounds; of one sequence without them."""
        return (0, self.x.shape[2]) if self.bounds is None else self.bounds

    def to(self, dtype: torch.dtype) -> "CausalConv1dCall":
        """The same call with all numbers in one dtype."""
        bias, state = (None if x is None else x.to(dtype) for x in (self.bias, self.state))
        return self._replace(x=self.x.to(dtype), weight=self.weight.to(dtype), bias=bias, state=state)
