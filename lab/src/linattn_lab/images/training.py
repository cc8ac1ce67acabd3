"""Trains a classifier of images with the labs' trainer, keeps it in a folder, and makes it again from there."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linattn._files import parsing, write_json

from ..training.config import TrainConfig
from ..training.lock import training_lock
from ..training.tensor_files import read_tensors, write_tensors
from ..training.trainer import Trainer
from .datasets import ImageSet, Part
from .resnet import ResNet18

DEFAULTS = TrainConfig(
    steps=1200, batch_size=128, lr=3e-3, warmup=100, final_lr=0.01, weight_decay=0.05, clip=5.0, validate_every=500
)
WEIGHTS, SETTINGS = "weights.safetensors", "model.json"
Model = TypeVar("Model", bound=nn.Module)
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def cross_entropy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Summed over the batch, as the trainer wants it."""
    return F.cross_entropy(model(images), labels, reduction="sum")


def train(
    model: nn.Module,
    data: Part,
    config: TrainConfig = DEFAULTS,
    folder: str | os.PathLike[str] | None = None,
    *,
    loss: Loss = cross_entropy,
    validation: int = 1000,
    augment: bool = False,
    about: dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    show: bool = True,
) -> dict[str, list[tuple[int, float]]]:
    """Trains the model in place and returns the losses; with a folder also writes checkpoints and the finished model.

    Args:
        loss: of the model, images (N, C, H, W) and classes (N,): summed over the batch.
        validation: how many of the images are kept out to watch the loss on.
        augment: moves images by up to 2 pixels and mirrors half of them.
        about: goes into the folder's JSON, for `load_model`.
        optimizer: of the model's parameters; by default AdamW.
    """
    if not 0 <= validation < len(data):
        raise ValueError(f"validation must leave some of the {len(data)} pictures to train on, got {validation}.")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(config.seed)).tolist()

    def batch_loss(network: nn.Module, places: list[int]) -> tuple[Tensor, float]:
        images, labels = data.images[places], data.labels[places]
        if augment and network.training:
            images = moved(images)
        return loss(network, images, labels), float(len(places))

    trainer = Trainer(
        model, batch_loss, order[validation:], order[:validation], config, folder, about=about, optimizer=optimizer
    )
    with nullcontext() if folder is None else training_lock(folder):
        history = trainer.run(show=show)
        model.eval()
        if folder is not None:
            save_model(model, folder, about)
    return history


def moved(images: Tensor, reach: int = 2) -> Tensor:
    """The images, each moved by up to `reach` pixels (edges repeated) and mirrored or not."""
    count, _, height, width = images.shape
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    rows = torch.randint(0, 2 * reach + 1, (count, 1)) + torch.arange(height)  # (N, H)
    columns = torch.randint(0, 2 * reach + 1, (count, 1)) + torch.arange(width)  # (N, W)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
    each = torch.arange(count)[:, None, None]
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def save_model(model: nn.Module, folder: str | os.PathLike[str], about: dict[str, Any] | None = None) -> None:
    """Weights as safetensors, and what makes the model again (its `settings`) and `about` as JSON."""
    facts = {"model": type(model).__name__, "settings": getattr(model, "settings", {}), "about": about or {}}
    write_tensors(Path(folder) / WEIGHTS, dict(model.state_dict()), {"version": "1"})
    write_json(Path(folder) / SETTINGS, facts)


def refuse_other(folder: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises if the model of a folder was made in another way than is asked for."""
    for name, value in json.loads(json.dumps(asked)).items():
        if found.get(name) != value:
            raise ValueError(
                f"{folder} holds a model with {name} {found.get(name)}, not {value}: choose another folder, "
                "or delete that one."
            )


def load_model(
    folder: str | os.PathLike[str],
    make: Callable[..., Model] = ResNet18,  # type: ignore[assignment]
) -> tuple[Model, dict[str, Any]]:
    """The model of a folder, ready to be used, and what was written about it.

    Args:
        make: is called with the model's `settings`.
    """
    path = Path(folder) / SETTINGS
    if not path.is_file():
        raise ValueError(f"{os.fspath(folder)} holds no trained model ({SETTINGS} is missing): train one there first.")
    with parsing(path):
        facts = json.loads(path.read_text())
        model = make(**facts["settings"])
        about = facts["about"]
    with parsing(Path(folder) / WEIGHTS):
        model.load_state_dict(read_tensors(Path(folder) / WEIGHTS)[0])
    return model.eval(), about


@torch.no_grad()
def scores(model: nn.Module, images: Tensor, batch: int = 500) -> Tensor:
    """What the model says of each image, (N, classes)."""
    model.eval()
    return torch.cat([model(part) for part in images.split(batch)])


def accuracy(model: nn.Module, part: Part) -> float:
    return float((scores(model, part.images).argmax(1) == part.labels).double().mean())


def folds(count: int, parts: int, seed: int = 0) -> Sequence[tuple[Tensor, Tensor]]:
    """For each of `parts` folds: the places to train on, and those held out. Every place is held out once."""
    if not 2 <= parts <= count:
        raise ValueError(f"folds must be 2 to {count}, got {parts}.")
    pieces = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).chunk(parts)
    return [(torch.cat([*pieces[:i], *pieces[i + 1 :]]), pieces[i]) for i in range(parts)]


def new_model(data: ImageSet, *, width: int, stem: str, seed: int) -> ResNet18:
    """A ResNet-18 for these images, its weights drawn from the seed."""
    torch.manual_seed(seed)
    return ResNet18(len(data.classes), width=width, stem=stem, channels=data.channels)
