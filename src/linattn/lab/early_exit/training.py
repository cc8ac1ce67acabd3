"""Trains networks with and without exits the same way, and keeps them in folders."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..images import training as images_training
from ..images.resnet import ResNet18
from ..images.sets import ImageSet, Part
from ..trainer import TrainConfig
from .backbones import new_resnet_exits, transformer_exits
from .wrapper import EarlyExit, weighted_loss

DEFAULTS = TrainConfig(
    steps=1000, batch_size=128, lr=3e-3, warmup=100, final_lr=0.01, weight_decay=0.05, clip=5.0, validate_every=250
)
WEIGHTS = (1.0, 0.3, 0.3, 0.3)  # of the exits, first to last
WATCHED = 500  # training pictures on which the trainer watches the loss


@dataclass(frozen=True)
class Split:
    """Pictures to train on, to choose tolerances on, and to judge by; no picture is in two of them."""

    train: Part
    validation: Part
    test: Part


def split(data: ImageSet, validation: int) -> Split:
    """Keeps the last `validation` of the training pictures out of the training."""
    count = len(data.train) - validation
    if not (validation > 0 and count > WATCHED):
        raise ValueError(
            f"of {len(data.train)} training pictures {validation} cannot be kept for validation: "
            f"more than {WATCHED} must remain."
        )
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    return Split(data.train.take(order[:count]), data.train.take(order[count:]), data.test)


def exits_loss(weights: Sequence[float]) -> images_training.Loss:
    """The weighted sum of the exits' cross-entropies, as a loss of the trainer."""

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return weighted_loss(model(images), labels, weights)

    return loss


def obtain(
    folder: Path,
    make: Callable[..., nn.Module],
    settings: dict[str, Any],
    data: Part,
    config: TrainConfig,
    *,
    loss: images_training.Loss = images_training.cross_entropy,
    about: dict[str, Any] | None = None,
    show: bool = True,
) -> nn.Module:
    """The model of a folder if it was trained this way, else one that is trained now."""
    about = (about or {}) | {"train": len(data), "config": asdict(config)}
    if (folder / images_training.SETTINGS).is_file():
        model, found = images_training.load_model(folder, make)
        there, asked = {**found, **_settings(model)}, {**json.loads(json.dumps(about)), **settings}
        other = [name for name in asked if there.get(name) != asked[name]]
        if other:
            name = other[0]
            raise ValueError(
                f"{folder} holds a model with {name} {there.get(name)}, not {asked[name]}: choose another folder, "
                "or delete that one."
            )
    else:
        torch.manual_seed(config.seed)
        model = make(**settings)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images_training.train(model, data, config, folder, loss=loss, validation=WATCHED, about=about, show=show)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval()


def _settings(model: nn.Module) -> dict[str, Any]:
    settings: dict[str, Any] = getattr(model, "settings", {})
    return settings


class Bench:
    """The networks of one study, each trained or loaded when it is asked for."""

    def __init__(self, folder: Path, data: ImageSet, parts: Split, config: TrainConfig, *, show: bool = True):
        self.folder, self.data, self.parts, self.config, self.show = folder, data, parts, config, show
        self.side = data.train.images.shape[-1]
        self.about = {"data": data.name, "classes": list(data.classes), "side": self.side}

    def exits(self, width: int, layout: str = "conv", weights: Sequence[float] = WEIGHTS) -> EarlyExit:
        settings = self._resnet(width) | {"side": self.side, "layout": layout}
        return self._obtain("exits", new_resnet_exits, settings, weights)  # type: ignore[return-value]

    def static(self, width: int) -> ResNet18:
        """A ResNet without exits."""
        return self._obtain(f"static-{width}", ResNet18, self._resnet(width))  # type: ignore[return-value]

    def transformer(self) -> EarlyExit:
        settings = {"classes": len(self.data.classes), "channels": self.data.channels, "side": self.side}
        return self._obtain("transformer", transformer_exits, settings, WEIGHTS)  # type: ignore[return-value]

    def _resnet(self, width: int) -> dict[str, Any]:
        return {"classes": len(self.data.classes), "width": width, "stem": "cifar", "channels": self.data.channels}

    def _obtain(
        self, name: str, make: Callable[..., nn.Module], settings: dict[str, Any], weights: Sequence[float] | None = None
    ) -> nn.Module:
        if self.show:
            print(f"{name}: {self.folder / name}", file=sys.stderr)
        about, loss = self.about, images_training.cross_entropy
        if weights is not None:
            about, loss = about | {"weights": list(weights)}, exits_loss(weights)
        return obtain(
            self.folder / name, make, settings, self.parts.train, self.config, loss=loss, about=about, show=self.show
        )
