"""The causal convolution token by token: the definition."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .call import CausalConv1dCall


def causal_conv1d(call: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """out (b, c, t) and the last w - 1 inputs (b * n, c, w - 1)."""
    x, weight, bias, state, _, silu, mask = call
    bounds = call.ends
    b, c, t = x.shape
    n, carried = len(bounds) - 1, weight.shape[1] - 1
    windows = x.new_zeros(b * n, c, carried) if state is None else state
    out, last = [], []
    for row, entry in enumerate(x):
        inputs = entry.unsqueeze(-1).unbind(1)  # each (c, 1)
        for i in range(n):
            window = windows[row * n + i]
            for at in range(bounds[i], bounds[i + 1]):
                if mask is not None and not mask[row, at]:
                    out.append(x.new_zeros(c))
                    continue
                window = torch.cat([window, inputs[at]], -1)
                y = (window * weight).sum(-1)
                y = y if bias is None else y + bias
                out.append(F.silu(y) if silu else y)
                window = window[:, 1:]
            last.append(window)
    rows = torch.stack(out).reshape(b, t, c).mT if out else torch.zeros_like(x)
    return rows, torch.stack(last) if last else windows
