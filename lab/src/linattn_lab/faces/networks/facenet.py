"""NN1 and NN2 of the FaceNet paper (Schroff, Kalenichenko, Philbin 2015), layer by layer from its tables 1 and 2."""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, normalize


class Maxout(nn.Module):
    """The larger of two linear maps, element by element."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(-1, (2, -1)).amax(-2)


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return normalize(torch.flatten(x, 1), dim=-1)


class L2Pool(nn.Module):
    """Root of the mean square over 3 x 3."""

    def forward(self, x: Tensor) -> Tensor:
        return avg_pool2d(x.square(), 3, 1, 1).clamp_min(1e-12).sqrt()


def convolution(inputs: int, outputs: int, width: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, width, stride, width // 2), nn.ReLU()]


def nn1(dim: int = 128, channels: int = 3) -> nn.Sequential:
    """Zeiler and Fergus with 1 x 1 convolutions, for 220 x 220: 140M parameters, 1.6G multiply-adds."""
    halve = (3, 2, 1)
    return nn.Sequential(
        *convolution(channels, 64, 7, 2),  # 110 x 110
        nn.MaxPool2d(*halve),  # 55 x 55
        nn.LocalResponseNorm(5),
        *convolution(64, 64, 1),
        *convolution(64, 192, 3),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(*halve),  # 28 x 28
        *convolution(192, 192, 1),
        *convolution(192, 384, 3),
        nn.MaxPool2d(*halve),  # 14 x 14
        *convolution(384, 384, 1),
        *convolution(384, 256, 3),
        *convolution(256, 256, 1),
        *convolution(256, 256, 3),
        *convolution(256, 256, 1),
        *convolution(256, 256, 3),
        nn.MaxPool2d(*halve),  # 7 x 7
        nn.Flatten(),
        Maxout(256 * 7 * 7, 32 * 128),
        Maxout(32 * 128, 32 * 128),
        nn.Linear(32 * 128, dim),
        Unit(),
    )


class Inception(nn.Module):
    """Branches side by side: 1 x 1, reduced 3 x 3, reduced 5 x 5, pooled. With stride 2 there is no 1 x 1 branch."""

    def __init__(
        self,
        inputs: int,
        single: int,
        three: tuple[int, int],
        five: tuple[int, int],
        pool: str,
        pooled: int,
        stride: int = 1,
    ):
        super().__init__()
        branches = [nn.Sequential(*convolution(inputs, single, 1))] if single else []
        for (reduced, outputs), width in ((three, 3), (five, 5)):
            branches.append(
                nn.Sequential(*convolution(inputs, reduced, 1), *convolution(reduced, outputs, width, stride))
            )
        way: list[nn.Module] = [L2Pool() if pool == "L2" else nn.MaxPool2d(3, stride, 1)]
        branches.append(nn.Sequential(*way, *(convolution(inputs, pooled, 1) if pooled else [])))
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def nn2(dim: int = 128, channels: int = 3) -> nn.Sequential:
    """Inception, for 224 x 224: 7.5M parameters, 1.6G multiply-adds."""
    return nn.Sequential(
        *convolution(channels, 64, 7, 2),  # 112 x 112
        nn.MaxPool2d(3, 2, 1),  # 56 x 56
        nn.LocalResponseNorm(5),
        *convolution(64, 64, 1),
        *convolution(64, 192, 3),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2, 1),  # 28 x 28
        Inception(192, 64, (96, 128), (16, 32), "max", 32),  # 3a: 256
        Inception(256, 64, (96, 128), (32, 64), "L2", 64),  # 3b: 320
        Inception(320, 0, (128, 256), (32, 64), "max", 0, stride=2),  # 3c: 640 at 14 x 14
        Inception(640, 256, (96, 192), (32, 64), "L2", 128),  # 4a: 640
        Inception(640, 224, (112, 224), (32, 64), "L2", 128),  # 4b
        Inception(640, 192, (128, 256), (32, 64), "L2", 128),  # 4c
        Inception(640, 160, (144, 288), (32, 64), "L2", 128),  # 4d
        Inception(640, 0, (160, 256), (64, 128), "max", 0, stride=2),  # 4e: 1024 at 7 x 7
        Inception(1024, 384, (192, 384), (48, 128), "L2", 128),  # 5a: 1024
        Inception(1024, 384, (192, 384), (48, 128), "max", 128),  # 5b
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, dim),
        Unit(),
    )
