"""The causal convolution as a sum of shifted products, in plain torch: any device, memory linear in the tokens."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .call import CausalConv1dCall
from .streams import convolve_streams


def causal_conv1d(call: CausalConv1dCall) -> tuple[Tensor, Tensor]:
    """Tensors of one dtype -> out (b, c, t), the last inputs (b * n, c, w - 1)."""
    x, weight, bias, state, bounds, silu, mask = call
    carried = weight.shape[1] - 1
    if mask is not None or bounds is not None:

        def convolve(stream: Tensor) -> Tensor:
            return _convolve(F.pad(stream, (carried, 0)), weight, bias, silu)

        return convolve_streams(convolve, call)
    padded = F.pad(x, (carried, 0)) if state is None else torch.cat([state, x], -1)
    return _convolve(padded, weight, bias, silu), padded[..., padded.shape[-1] - carried :].clone()


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """padded (b, c, t + w - 1) -> (b, c, t)."""
    width = weight.shape[1]
    tokens = padded.shape[-1] - width + 1
    out = sum(padded[..., i : i + tokens] * weight[:, i, None] for i in range(width))
    assert isinstance(out, Tensor)
    out = out if bias is None else out + bias.unsqueeze(-1)
    return F.silu(out) if silu else out
