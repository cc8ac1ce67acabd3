"""ResNet-18 of any width, for small images ("cifar" stem) and for large ones ("imagenet" stem)."""

import torch
from torch import Tensor, nn

STEMS = ("cifar", "imagenet")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()  # never in place: a probe may be holding what it would overwrite
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + around)


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's module names, so that its weights load with `load_state_dict`.

    Args:
        classes: of the output.
        width: channels of the first stage; the later ones have 2, 4 and 8 times as many.
        stem: "imagenet" is a 7x7 convolution and a pooling that leave a quarter of each side; "cifar" is a 3x3
            convolution that leaves the image as large as it was, and its `maxpool` does nothing.
        channels: of the pictures.
    """

    def __init__(self, classes: int, *, width: int = 64, stem: str = "cifar", channels: int = 3):
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"stem must be one of {STEMS}, got {stem!r}.")
        if min(classes, width, channels) < 1:
            raise ValueError(f"classes, width and channels must be positive, got {classes}, {width} and {channels}.")
        self.settings = {"classes": classes, "width": width, "stem": stem, "channels": channels}
        large = stem == "imagenet"
        self.conv1 = nn.Conv2d(channels, width, 7 if large else 3, 2 if large else 1, 3 if large else 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width))
        self.layer4 = nn.Sequential(BasicBlock(4 * width, 8 * width, 2), BasicBlock(8 * width, 8 * width))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, channels, height, width) to scores (N, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))
