"""Networks from an image to a unit vector: small ones for a CPU, and those of the paper."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import normalize

from . import facenet as paper_networks
from .two_tower import Standardize, Towers
from .vision_transformer import PatchTransformer

KINDS = {
    "small": "pixels and edge directions, 0.75M parameters: the default",
    "tiny": "the same at half the width",
    "transformer": "vision transformer with linear attention (elu)",
    "nn1": "of the paper: 140M parameters, pictures of 220 x 220",
    "nn2": "of the paper: Inception, 7.5M parameters, pictures of 224 x 224",
}


@dataclass(frozen=True)
class NetworkSpec:
    """What a network is: its kind, the height and width of its images, 1 channel (grey) or 3, length of its vectors."""

    kind: str = "small"
    size: tuple[int, int] = (56, 48)
    channels: int = 1
    dim: int = 128


def build(spec: NetworkSpec) -> nn.Module:
    """A fresh network: (N, channels, height, width) from 0 to 1 -> unit vectors (N, dim)."""
    if spec.kind not in KINDS:
        raise ValueError(f"no network {spec.kind!r}: there are {', '.join(KINDS)}.")
    if spec.kind in ("nn1", "nn2"):
        return getattr(paper_networks, spec.kind)(spec.dim, spec.channels)
    if spec.size[0] % 8 or spec.size[1] % 8 or min(spec.size) < 8:
        raise ValueError(f"pictures must be a multiple of 8 high and wide, got {spec.size[0]} x {spec.size[1]}.")
    if spec.kind == "transformer":
        return Unit(nn.Sequential(Standardize(), PatchTransformer(spec.size, spec.channels, spec.dim)))
    return Unit(Towers(spec.size, spec.channels, spec.dim, narrow=2 if spec.kind == "tiny" else 1))


class Unit(nn.Module):
    """Gives the body's vectors unit length."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return normalize(self.body(x), dim=-1)
