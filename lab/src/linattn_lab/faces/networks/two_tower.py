"""The default network: one tower sees pixels, the other the directions of edges, and one layer joins them."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d, pad

DIRECTIONS = 8


class Towers(nn.Module):
    """(N, C, H, W) from 0 to 1 -> (N, dim). Places are kept to the end: the last layer sees all of them.

    Args:
        size: height and width, multiples of 8.
        narrow: divides the width of every layer.
    """

    def __init__(self, size: tuple[int, int], channels: int, dim: int, narrow: int = 1):
        super().__init__()
        first, second, third, edges = (n // narrow for n in (16, 32, 64, 64))
        self.pixels = nn.Sequential(
            Standardize(),
            nn.Conv2d(channels, first, 5, 2, 2, bias=False),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            *_convolution(first, second),
            nn.MaxPool2d(2),
            *_convolution(second, third),
            nn.MaxPool2d(2),
            *_convolution(third, third),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.edges = nn.Sequential(EdgeDirections(), *_convolution(DIRECTIONS, edges), nn.MaxPool2d(2))
        places = (size[0] // 8) * (size[1] // 8)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear((third + edges) * places, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.pixels(x), self.edges(x)], 1))


class Standardize(nn.Module):
    """Takes brightness and contrast out of each picture."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean((1, 2, 3), keepdim=True)
        x = x / (x.square().mean((1, 2, 3), keepdim=True).sqrt() + 0.02)
        return x.contiguous(memory_format=torch.channels_last)


class EdgeDirections(nn.Module):
    """How much edge there is in each of 8 directions, in cells of 4 x 4 pixels, against what lies around.

    Fixed filters: with 300 images to learn from, invariance to light is better given than learned.
    """

    filters: Tensor
    directions: Tensor

    def __init__(self, sigma: float = 1.0, reach: int = 3):
        super().__init__()
        along = torch.arange(-reach, reach + 1, dtype=torch.float32)
        bell = torch.exp(-(along**2) / (2 * sigma**2))
        bell /= bell.sum()
        slope = along / sigma**2 * bell
        angles = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
        self.reach = reach
        self.register_buffer("filters", torch.stack([bell.outer(slope), slope.outer(bell)])[:, None])  # (2, 1, 7, 7)
        self.register_buffer(
            "directions", torch.stack([angles.cos(), angles.sin()], 1)[..., None, None]
        )  # (8, 2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        gradient = conv2d(pad(x.mean(1, keepdim=True), (self.reach,) * 4, mode="replicate"), self.filters)
        strength = gradient.square().sum(1, keepdim=True).add(1e-8).sqrt()
        share = (
            conv2d(gradient / strength, self.directions).relu().pow(3)
        )  # cosines: each edge in about three directions
        cells = avg_pool2d(strength * share, 4)
        around = avg_pool2d(cells.square().sum(1, keepdim=True), 9, 1, 4, count_include_pad=False).sqrt()
        smooth = avg_pool2d(cells / (around + 0.005), 3, 1, 1, count_include_pad=False)
        return smooth.clamp_min(1e-6).sqrt() - 0.3  # about centred


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
