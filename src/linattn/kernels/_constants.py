"""Buffers that are constants: they move between devices by value and stay in full precision."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


class ConstantBuffers(nn.Module):
    """A module whose buffers keep their values whatever `to` is called on the model around it.

    `to(bfloat16)` would round a random projection, and the features with it; `to_empty` and `to("meta")` would lose it,
    and no checkpoint of the model brings it back. Parameters follow the model as usual.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ConstantBuffers":
        before = {name: x for name, x in self._buffers.items() if x is not None and not x.is_meta}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if new is None or type(new) is not type(old):  # a fake tensor stands for the old one
                continue
            device = old.device if new.is_meta else new.device
            self._buffers[name] = old.to(device, old.dtype if new.dtype in HALF else new.dtype)
        return self
