"""Augmentation: shift, rotation, stretch, elastic deformation and lighting."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate


@dataclass(frozen=True)
class Augmentation:
    """How far a view may go; each is drawn evenly from both sides of zero (light and bend: normal, even)."""

    turn: float = 10.0  # degrees
    scale: float = 0.1
    stretch: float = 0.05  # height against width
    shift: float = 0.1  # of half the image
    shear: float = 0.1
    bend: float = 0.0  # of half the image, at 4 x 4 points
    gamma: float = 0.3  # log of the exponent
    light: float = 0.2  # spread of the light in the four corners
    noise: float = 0.01


def augment(pictures: Tensor, how: Augmentation) -> Tensor:
    """Another view of each of (N, C, H, W), by torch's generator."""
    count, height, width = len(pictures), *pictures.shape[-2:]

    def even(reach: float) -> Tensor:
        return (torch.rand(count) * 2 - 1) * reach

    angle, shear, ratio = even(how.turn * math.pi / 180), even(how.shear), width / height
    wide = 1 + even(how.scale)
    high = wide * (1 + even(how.stretch))
    # Coordinates run from -1 to 1 both ways: `ratio` keeps a turn a turn in images that are not square.
    across = torch.stack([angle.cos() * wide, (shear - angle.sin() * wide) / ratio, even(how.shift)], 1)
    down = torch.stack([angle.sin() * high * ratio, angle.cos() * high, even(how.shift)], 1)
    grid = affine_grid(torch.stack([across, down], 1), [count, 1, height, width], align_corners=False)
    if how.bend:
        points = (torch.rand(count, 2, 4, 4) * 2 - 1) * how.bend
        grid = grid + interpolate(points, (height, width), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    views = grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    views = views.clamp_min(1e-4).pow(even(how.gamma).exp()[:, None, None, None])
    corners = torch.randn(count, 1, 2, 2) * how.light
    views = views * (1 + interpolate(corners, (height, width), mode="bilinear", align_corners=True))
    return views + torch.randn(views.shape) * how.noise
