"""Networks from a picture to a unit vector."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize


@dataclass(frozen=True)
class NetworkSpec:
    """What a network is: its kind, the height and width of its pictures, 1 channel (grey) or 3, length of its vectors."""

    kind: str = "small"
    size: tuple[int, int] = (56, 46)
    channels: int = 1
    dim: int = 128


def build(spec: NetworkSpec) -> nn.Module:
    """A fresh network: (N, channels, height, width) from 0 to 1 -> unit vectors (N, dim)."""
    if spec.kind not in KINDS:
        raise ValueError(f"no network {spec.kind!r}: there are {', '.join(KINDS)}.")
    return KINDS[spec.kind](spec)


class SmallNet(nn.Module):
    """Five convolutions, each with a norm."""

    def __init__(self, spec: NetworkSpec):
        super().__init__()
        layers: list[nn.Module] = []
        width = spec.channels
        for out in (32, 64, 96, 128):
            layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
            width = out
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width * (spec.size[0] // 16) * (spec.size[1] // 16), spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self.head(torch.flatten(self.body(x), 1)), dim=-1)


KINDS = {"small": SmallNet}
