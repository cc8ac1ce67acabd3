"""Networks cut into stages with heads: the ResNet of the labs, and a transformer with linear attention."""

import math
from typing import Any

from torch import Tensor, nn

from linattn.kernels import KernelName
from linattn.nn import TransformerEncoderLayer

from ..images.resnet import ResNet18
from .wrapper import EarlyExit

# Layout -> kind of head, and the blocks after which there is one. "linear" is the course's.
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "conv": ("conv", ("stem", "layer1.0", "layer2.0")),
    "linear": ("linear", ("layer1.1", "layer2.1", "layer3.1")),
}
LAYERS, PATCH = 4, 4  # of the transformer: how deep, and pixels across that a token covers
POOLED = 4  # rows and columns that the convolutions of a head leave for its pool


def resnet_exits(net: ResNet18, side: int, layout: str = "conv") -> EarlyExit:
    """A ResNet with exits. It keeps its own weights, and its own pool and linear layer are the last head.

    Args:
        net: any width and stem.
        side: of the images, in pixels.
        layout: "linear" has the course's heads, flatten and linear, after the stages 1, 2 and 3. "conv" has heads of
            convolutions after the stem and the first blocks of the stages 1 and 2: a linear map of what the first
            layers see, a few pixels each, cannot tell shapes apart.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: choose from {', '.join(LAYOUTS)}.")
    kind, after = LAYOUTS[layout]
    classes, width = net.fc.out_features, net.conv1.out_channels
    settings = net.settings | {"side": side, "layout": layout}
    parts: dict[str, nn.Module] = {"stem": nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)}
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        parts |= {f"{stage}.{number}": block for number, block in enumerate(getattr(net, stage))}
    if net.settings["stem"] == "imagenet":
        side = -(-side // 4)
    channels, stages, heads = width, [], []
    since: list[nn.Module] = []
    for name, part in parts.items():
        since.append(part)
        if name in ("layer2.0", "layer3.0", "layer4.0"):  # what halves the side
            channels, side = 2 * channels, -(-side // 2)
        if name in after:
            stages.append(nn.Sequential(*since))
            since = []
            head = (
                linear_head(channels, side, classes)
                if kind == "linear"
                else conv_head(channels, side, classes, 4 * width)
            )
            heads.append(head)
    stages.append(nn.Sequential(*since))
    heads.append(nn.Sequential(net.avgpool, nn.Flatten(), net.fc))
    return EarlyExit(stages, heads, settings)


def new_resnet_exits(*, side: int, layout: str, **settings: Any) -> EarlyExit:
    """The same around a new ResNet, from all `settings` of one."""
    return resnet_exits(ResNet18(**settings), side, layout)


def linear_head(channels: int, side: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, classes))


def conv_head(channels: int, side: int, classes: int, widest: int) -> nn.Module:
    """Pools, halves the side and doubles the channels, up to `widest`, by pairs of convolutions; pool; linear."""
    layers: list[nn.Module] = [nn.AvgPool2d(2, ceil_mode=True)]
    side = -(-side // 2)
    while side > POOLED:
        wider = min(2 * channels, widest)
        layers += [nn.Conv2d(channels, wider, 3, 2, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        layers += [nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        channels, side = wider, -(-side // 2)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Tokens(nn.Sequential):
    """Images (N, C, side, side) as sequences of tokens (N, tokens, dim): convolutions that halve the side again and again.

    A transformer learns sooner from these than from one cut into patches (Xiao et al., 2021).
    """

    def __init__(self, channels: int, side: int, patch: int, dim: int):
        halvings = patch.bit_length() - 1
        if patch != 2**halvings or halvings < 1 or side % patch:
            raise ValueError(f"patches must be a power of 2 that divides the side {side} of the pictures, got {patch}.")
        layers: list[nn.Module] = []
        for number in range(halvings, -1, -1):
            wider = dim // 2**number
            layers += [nn.Conv2d(channels, wider, 3, 1 if number == halvings else 2, 1, bias=False)]
            layers += [nn.BatchNorm2d(wider), nn.ReLU()]
            channels = wider
        super().__init__(*layers[:-1], nn.Flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


class Layer(nn.Module):
    """A convolution over the grid of tokens, channel by channel, then a transformer layer with attention in linear time.

    Linear attention averages over the whole image; the convolution sees what is next to a token, and where the edge is
    (Chu et al., 2021), so that places need no embedding.
    """

    def __init__(self, dim: int, heads: int, kernel: KernelName):
        super().__init__()
        self.near = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.far = TransformerEncoderLayer(
            dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True, kernel=kernel
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = math.isqrt(x.shape[1])
        near: Tensor = self.near(x.transpose(1, 2).unflatten(2, (rows, rows)))
        out: Tensor = self.far(x + near.flatten(2).transpose(1, 2))  # (N, tokens, dim)
        return out


class MeanHead(nn.Sequential):
    """The mean over tokens, normalised over the batch, to classes. (N, tokens, dim) -> (N, classes).

    Means of many tokens are much alike: a norm over their channels would leave them so.
    """

    def __init__(self, dim: int, classes: int):
        super().__init__(nn.BatchNorm1d(dim), nn.Linear(dim, classes))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1))


def transformer_exits(
    classes: int,
    *,
    channels: int = 1,
    side: int = 32,
    patch: int = PATCH,
    dim: int = 64,
    heads: int = 4,
    layers: int = LAYERS,
    kernel: KernelName = "elu",
) -> EarlyExit:
    """A transformer over patches of an image as tokens, attention in linear time, with an exit after every layer."""
    settings: dict[str, Any] = {"classes": classes, "channels": channels, "side": side, "patch": patch}
    settings |= {"dim": dim, "heads": heads, "layers": layers, "kernel": kernel}
    stages: list[nn.Module] = [Layer(dim, heads, kernel) for _ in range(layers)]
    stages[0] = nn.Sequential(Tokens(channels, side, patch, dim), stages[0])
    return EarlyExit(stages, [MeanHead(dim, classes) for _ in range(layers)], settings)
