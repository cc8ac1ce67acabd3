"""A vision transformer with linear attention: patches as tokens."""

import torch
from torch import Tensor, nn

from linattn.kernels import KernelName
from linattn.nn import TransformerEncoder, TransformerEncoderLayer


class PatchTransformer(nn.Module):
    """(N, C, H, W) -> (N, dim), by overlapping patches of 12 x 12 every 8 pixels, learned places and pre-norm layers.

    Args:
        size: height and width, multiples of 8.
        kernel: of the attention; see linattn.kernels.
    """

    def __init__(
        self,
        size: tuple[int, int],
        channels: int,
        dim: int,
        *,
        width: int = 96,
        heads: int = 4,
        layers: int = 3,
        kernel: KernelName = "elu",
    ):
        super().__init__()
        tokens = (size[0] // 8) * (size[1] // 8)
        self.patches = nn.Conv2d(channels, width, 12, stride=8, padding=2)
        self.places = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        layer = TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True, kernel=kernel
        )
        self.encoder = TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        # Faces stand in one place: what is found where matters, so tokens are laid side by side, narrowed, not averaged.
        self.narrow = nn.Linear(width, 32)
        self.head = nn.Linear(32 * tokens, dim)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places  # (N, T, width)
        return self.head(self.narrow(self.encoder(tokens)).flatten(1))
