"""Trains networks with and without exits in the same way, and stores them in folders."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn._files import parsing, write_json

from ..images import training as images_training
from ..images.datasets import ImageSet, Part, load
from ..images.resnet import ResNet18
from ..images.shapes import SHAPE_CLASSES, generate
from ..training.config import TrainConfig
from ..training.lock import training_lock
from ..training.muon import Muon
from . import distill
from .backbones import LAYERS, new_resnet_exits, transformer_exits
from .rules import PerExit, Rule, make_rule, name_of
from .wrapper import EarlyExit, weighted_loss

DEFAULTS = TrainConfig(
    steps=300, batch_size=64, lr=1e-2, warmup=30, final_lr=0.01, weight_decay=0.05, clip=5.0, validate_every=150
)
WEIGHTS = (1.0, 0.3, 0.3, 0.3)  # of the exits, first to last
# A transformer takes longer to find the shapes in the noise, and bears a lower rate.
TRANSFORMER = replace(DEFAULTS, steps=2000, lr=2e-3, warmup=200, validate_every=500)  # by AdamW
CHOICE = "choice.json"
WATCHED = 500  # at most so many training images only serve to watch the loss


@dataclass(frozen=True)
class Split:
    """Images to train on, to choose tolerances on, and to judge by; no image is in two of them."""

    classes: tuple[str, ...]
    train: Part
    validation: Part
    test: Part


@dataclass(frozen=True)
class Pictures:
    """Which images, in few words, so that a folder can remember them. See `images.load` for data, train, test and side.

    Attributes:
        validation: how many of the training images are kept out of the training; by default a fifth, at most 3000.
        noise: the largest, where the images are shapes.
    """

    data: str = "shapes"
    train: int | None = None
    test: int | None = None
    validation: int | None = None
    noise: float = 0.45
    side: int = 32

    def split(self) -> Split:
        whole = self._load()
        kept = min(3000, len(whole.train) // 5) if self.validation is None else self.validation
        if not 0 < kept <= len(whole.train) // 2:
            raise ValueError(
                f"of {len(whole.train)} training pictures {kept} cannot be kept for validation: "
                "choose from 1 to half of them (--validation)."
            )
        count = len(whole.train) - kept
        order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(0))
        return Split(whole.classes, whole.train.take(order[:count]), whole.train.take(order[count:]), whole.test)

    def _load(self) -> ImageSet:
        if self.data != "shapes":
            return load(self.data, train=self.train, test=self.test, side=self.side)
        count = self.train or 30000
        drawn = generate(count + (self.test or 6000), noise=(0.0, self.noise))
        part = Part(torch.from_numpy(drawn.images), torch.from_numpy(drawn.labels), drawn.truth)
        places = torch.arange(len(part))
        return ImageSet("shapes", SHAPE_CLASSES, part.take(places[:count]), part.take(places[count:]))


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
    muon: bool = False,
    show: bool = True,
) -> nn.Module:
    """The model of a folder if it was trained this way, else one that is trained now."""
    about = (about or {}) | {"train": len(data), "config": asdict(config), "optimizer": "muon" if muon else "adamw"}
    if (folder / images_training.SETTINGS).is_file():
        model, found = images_training.load_model(folder, make)
        images_training.refuse_other(folder, {**found, **_settings(model)}, {**about, **settings})
    else:
        torch.manual_seed(config.seed)
        model = make(**settings)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        watched = min(WATCHED, len(data) // 10)
        optimizer = Muon(model, config.lr, config.weight_decay) if muon else None
        images_training.train(
            model,
            data,
            config,
            folder,
            loss=loss,
            validation=watched,
            about=about,
            optimizer=optimizer,
            show=show,
        )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval()


def _settings(model: nn.Module) -> dict[str, Any]:
    settings: dict[str, Any] = getattr(model, "settings", {})
    return settings


class Bench:
    """The networks of one study, each trained or loaded when it is asked for."""

    def __init__(
        self,
        folder: Path,
        pictures: Pictures,
        config: TrainConfig,
        *,
        distill_steps: int = distill.DEFAULTS.steps,
        parts: Split | None = None,
        show: bool = True,
    ):
        self.folder, self.config, self.show, self.distill_steps = folder, config, show, distill_steps
        self.parts = parts or pictures.split()
        self.about = {"pictures": asdict(pictures), "classes": list(self.parts.classes)}
        _, self.channels, _, self.side = self.parts.train.images.shape

    def recipe(self) -> dict[str, Any]:
        """Everything that the training depends on, but for the network itself."""
        return self.about | {"config": asdict(self.config), "distill_steps": self.distill_steps}

    def exits(self, width: int, layout: str = "conv", weights: Sequence[float] = WEIGHTS) -> EarlyExit:
        """A ResNet with exits, all trained together; then, unless it has no steps, the last one teaches the first."""
        settings = self._resnet(width) | {"side": self.side, "layout": layout}
        if not self.distill_steps:
            model = self._obtain("exits", new_resnet_exits, settings, weights)
            assert isinstance(model, EarlyExit)
            return model
        folder = self.folder / "exits"
        if (folder / images_training.SETTINGS).is_file():
            return self._taught(settings, weights)
        with training_lock(folder):  # from the first step of the network that teaches
            return self._taught(settings, weights)

    def _taught(self, settings: dict[str, Any], weights: Sequence[float]) -> EarlyExit:
        """All exits trained together, then the first taught by the last."""
        model = self._obtain("joint", new_resnet_exits, settings, weights)
        assert isinstance(model, EarlyExit)
        about = self.about | {"network": settings, "weights": list(weights), "train": len(self.parts.train)}
        about |= {"config": asdict(self.config)}
        steps = self.distill_steps
        config = replace(distill.DEFAULTS, steps=steps, warmup=max(1, steps // 10), seed=self.config.seed)
        return distill.distilled(model, self.folder / "exits", self.parts.train, config, about=about, show=self.show)

    def static(self, width: int) -> nn.Module:
        """A ResNet without exits."""
        return self._obtain(f"static-{width}", ResNet18, self._resnet(width))

    def transformer(self, steps: int = TRANSFORMER.steps) -> EarlyExit:
        """A transformer with exits, all of the same weight, trained for so many steps."""
        settings = {"classes": len(self.parts.classes), "channels": self.channels, "side": self.side}
        config = replace(
            TRANSFORMER, steps=steps, warmup=steps // 10, batch_size=self.config.batch_size, seed=self.config.seed
        )
        model = self._obtain("transformer", transformer_exits, settings, (1.0,) * LAYERS, config)
        assert isinstance(model, EarlyExit)
        return model

    def _resnet(self, width: int) -> dict[str, Any]:
        return {"classes": len(self.parts.classes), "width": width, "stem": "cifar", "channels": self.channels}

    def _obtain(
        self,
        name: str,
        make: Callable[..., nn.Module],
        settings: dict[str, Any],
        weights: Sequence[float] | None = None,
        config: TrainConfig | None = None,
    ) -> nn.Module:
        if self.show:
            print(f"{name}: {self.folder / name}", file=sys.stderr)
        about: dict[str, Any] = dict(self.about)
        loss: images_training.Loss = images_training.cross_entropy
        if weights is not None:
            about["weights"] = list(weights)
            loss = exits_loss(weights)
        return obtain(
            self.folder / name,
            make,
            settings,
            self.parts.train,
            config or self.config,
            loss=loss,
            about=about,
            muon=config is None,
            show=self.show,
        )


def load_exits(folder: Path) -> tuple[EarlyExit, Pictures, list[str]]:
    """The network with exits of a study's folder, the images that it was trained on, and the names of their classes."""
    model, about = images_training.load_model(folder / "exits", new_resnet_exits)
    assert isinstance(model, EarlyExit)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, Pictures(**about["pictures"]), about["classes"]


def write_choice(folder: Path, rule: Rule) -> None:
    """Keeps the rule to leave by beside the network."""
    write_json(folder / "exits" / CHOICE, {"rule": name_of(rule), "tolerance": rule.tolerance})


def read_choice(folder: Path) -> Rule:
    path = folder / "exits" / CHOICE
    if not path.is_file():
        raise ValueError(
            f"no rule was chosen in {folder}: run `linattn lab early-exit sweep`, or give --rule and --tolerance."
        )
    with parsing(path):
        found = json.loads(path.read_text())
        if found["rule"] == name_of(PerExit(())):
            return PerExit(tuple(None if own is None else float(own) for own in found["tolerance"]))
        return make_rule(found["rule"], found["tolerance"])
