"""torch.nn's transformer layers with a kernel; the stacks are torch's own."""

from typing import Any

from torch import nn

from ..kernels import Kernel
from .swap import swapped


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer, its arguments and its state_dict, with a kernel for its self-attention.

    `dropout` is of the layer; attention weights are not dropped, because a linear kernel never forms them.

    >>> import torch, linattn
    >>> layer = linattn.nn.TransformerEncoderLayer(32, 4, batch_first=True, kernel="elu")
    >>> model = linattn.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    >>> model(torch.randn(2, 500, 32)).shape
    torch.Size([2, 500, 32])
    """

    def __init__(self, *args: Any, kernel: Kernel | str = "softmax", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.self_attn = swapped(self.self_attn, kernel)
        self.self_attn.dropout = 0.0


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer with a kernel for its self-attention and one for its cross-attention.

    Args:
        kernel: of both, unless cross_kernel says otherwise.
        cross_kernel: of the attention to the encoder's output.
        The others are torch's.
    """

    def __init__(
        self, *args: Any, kernel: Kernel | str = "softmax", cross_kernel: Kernel | str | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.self_attn = swapped(self.self_attn, kernel)
        self.multihead_attn = swapped(self.multihead_attn, kernel if cross_kernel is None else cross_kernel)
        self.self_attn.dropout = self.multihead_attn.dropout = 0.0
