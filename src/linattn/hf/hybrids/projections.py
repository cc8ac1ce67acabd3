"""Projections for one token or two: reading the weights is all the work, and torch does not read at full speed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...engines.native import available, mixer
from ...engines.native.plans import eligible

MOST_ROWS = 2  # from here on torch's matrix product is as fast


class LinearForward:
    """Stands in for `forward` on one nn.Linear."""

    def __init__(self, module: nn.Module):
        self.module: Any = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        inputs = weight.shape[1]
        if x.shape[-1] != inputs or x.numel() > MOST_ROWS * inputs or not _served(x, weight, bias):
            return F.linear(x, weight, bias)
        return mixer.project(x.reshape(-1, inputs), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _served(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = (x, weight) if bias is None else (x, weight, bias)
    if not all(y.dtype is torch.float32 for y in given) or not weight.is_contiguous():
        return False
    return available() and eligible(*given) and not torch.is_autocast_enabled("cpu") and x.numel() > 0
