"""Self-distillation: the first heads of a trained network learn what its last exit says.

Most images leave at the first heads, and these are small: a few hundred steps of them cost little. The network itself stays
as it is, and so does the last exit, so that the full network is not a weaker one.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..images import training as images_training
from ..images.datasets import Part
from ..training.config import TrainConfig
from ..training.muon import Muon
from .backbones import new_resnet_exits
from .wrapper import EarlyExit

DEFAULTS = TrainConfig(
    steps=700, batch_size=64, lr=5e-3, warmup=70, final_lr=0.01, weight_decay=0.05, clip=5.0, validate_every=700
)
TAUGHT = 10000  # training images whose answers the last exit gives
HEADS = 1  # how many, from the first on, learn
SOFT = 0.9  # share of the last exit's answer in the target; the rest is the label


class Heads(nn.Module):
    """The first heads of a network, on images; the stages before them are frozen and not a part of it."""

    def __init__(self, model: EarlyExit, count: int):
        super().__init__()
        self.heads = nn.ModuleList(list(model.heads)[:count])
        self.frozen = (model,)  # in a tuple: neither trained nor put into training mode with the heads

    def forward(self, x: Tensor) -> list[Tensor]:
        (model,) = self.frozen
        found = []
        for stage, head in zip(model.stages, self.heads, strict=False):
            with torch.no_grad():
                x = stage(x)
            found.append(head(x))
        return found


def soft_loss(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    """Cross-entropies of all heads against probabilities (n, classes), summed."""
    losses = [F.cross_entropy(own, target, reduction="sum") for own in model(images)]
    return torch.stack(losses).sum()


@torch.no_grad()
def soft_targets(model: EarlyExit, data: Part, soft: float = SOFT) -> Tensor:
    """The last exit's probabilities, mixed with the labels."""
    model.eval()
    said = torch.cat([model.full(part).softmax(-1) for part in data.images.split(250)])
    return soft * said + (1 - soft) * F.one_hot(data.labels, said.shape[1])


def distilled(
    joint: EarlyExit, folder: Path, data: Part, config: TrainConfig, *, about: dict[str, Any], show: bool = True
) -> EarlyExit:
    """The network of the folder if it was made this way, else `joint` with its first heads taught now."""
    about = about | {"distill": asdict(config), "taught": TAUGHT, "heads": HEADS, "soft": SOFT}
    if (folder / images_training.SETTINGS).is_file():
        model, found = images_training.load_model(folder, new_resnet_exits)
        images_training.refuse_other(folder, found, about)
        assert isinstance(model, EarlyExit)
    else:
        if show:
            print(f"self-distillation: {folder}", file=sys.stderr)
        model = joint.eval()
        part = data.take(torch.arange(min(TAUGHT, len(data))))
        heads = Heads(model, min(HEADS, len(model.heads) - 1))
        lesson = Part(part.images, soft_targets(model, part))
        images_training.train(
            heads,
            lesson,
            config,
            folder / "heads",
            loss=soft_loss,
            validation=0,
            about=about,
            optimizer=Muon(heads, config.lr, config.weight_decay),
            show=show,
        )
        model.eval()
        images_training.save_model(model, folder, about)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval()
