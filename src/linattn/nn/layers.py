"""torch.nn's transformer layers with a kernel; the stacks are torch's own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from ..kernels import Kernel, KernelName
from .swap import swapped

Activation = str | Callable[[Tensor], Tensor]
Device = torch.device | str | int | None


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer, its arguments and its state_dict, with a kernel for its self-attention.

    `dropout` applies to the layer but not to the attention weights, which a linear kernel never forms.

    >>> import torch, linattn
    >>> layer = linattn.nn.TransformerEncoderLayer(32, 4, batch_first=True, kernel="elu")
    >>> model = linattn.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    >>> model(torch.randn(2, 500, 32)).shape
    torch.Size([2, 500, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: Kernel | KernelName = "softmax",
    ):
        first = d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps
        super().__init__(*first, batch_first, norm_first, bias, device, dtype)
        self.self_attn = swapped(self.self_attn, kernel)
        self.self_attn.dropout = 0.0


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer with a kernel for its self-attention and one for its cross-attention.

    Args:
        kernel: for both, unless cross_kernel is given.
        cross_kernel: for the attention to the encoder's output.
        Other arguments are torch's.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: Kernel | KernelName = "softmax",
        cross_kernel: Kernel | KernelName | None = None,
    ):
        first = d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps
        super().__init__(*first, batch_first, norm_first, bias, device, dtype)
        self.self_attn = swapped(self.self_attn, kernel)
        self.multihead_attn = swapped(self.multihead_attn, kernel if cross_kernel is None else cross_kernel)
        self.self_attn.dropout = self.multihead_attn.dropout = 0.0
