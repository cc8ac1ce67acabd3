"""The training recipe: triplet loss, plus a classification of the training people."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from ...training.config import TrainConfig
from ...training.trainer import Trainer
from ..networks import NetworkSpec, build
from .augmentation import Augmentation, augment
from .mining import TripletLoss, balanced_order

VERSION = 2  # of what a recipe means: trainings kept from another one are not used
SCALE = 12.0  # of cosines in the classification
BOND = 8.0  # weight of the squared distance between a new vector and the old one of the same image


@dataclass(frozen=True)
class Recipe:
    """A network and how it is trained.

    Args:
        spec: the network.
        mining: how triplets are chosen, one of mining.KINDS.
        classes: weight of telling the training people apart by a linear layer (cosines); 0 is the paper's loss alone.
        mirror: mirror images count as images of further people, which doubles the people to learn from.
        steps, people, images: batches in all, people in a batch, images of each.
        lr, weight_decay: of AdamW.
    """

    spec: NetworkSpec = field(default_factory=NetworkSpec)
    mining: str = "semihard"
    classes: float = 1.0
    mirror: bool = True
    steps: int = 150
    people: int = 20
    pictures: int = 4
    lr: float = 2e-3
    weight_decay: float = 0.05
    augmentation: Augmentation = field(default_factory=Augmentation)

    def config(self, seed: int) -> TrainConfig:
        return TrainConfig(
            steps=self.steps,
            batch_size=self.people * self.pictures,
            lr=self.lr,
            warmup=min(20, self.steps // 5),
            final_lr=0.02,
            weight_decay=self.weight_decay,
            clip=5.0,
            validate_every=max(1, self.steps // 5),
            checkpoint_every=max(1, self.steps // 5),
            seed=seed,
        )


class Learner(nn.Module):
    """The network, and a vector for each training person."""

    def __init__(self, network: nn.Module, people: int, dim: int):
        super().__init__()
        self.network = network
        self.people = nn.Parameter(normalize(torch.randn(people, dim), dim=-1))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors (N, dim) and their cosines with the people (N, people)."""
        vectors = self.network(pictures)
        return vectors, vectors @ normalize(self.people, dim=-1).T


def train(
    recipe: Recipe,
    pictures: Tensor,
    labels: Tensor,
    seed: int = 0,
    *,
    held_out: tuple[Tensor, Tensor] | None = None,
    old: nn.Module | None = None,
    folder: str | os.PathLike[str] | None = None,
    show: bool = False,
) -> tuple[nn.Module, dict[str, list[tuple[int, float]]]]:
    """A trained network and its losses.

    Args:
        images: (N, channels, height, width) from 0 to 1, of the size in the recipe.
        labels: (N,) people.
        held_out: images and labels of other people, whose triplet loss is shown.
        old: a frozen network of the same kind, where the new one begins. Triplets then mix its vectors with the new ones
            (the paper's harmonic triplet loss), people are told apart by the means of their old vectors, and a new
            vector is bound to the old one of its image, so that old and new vectors can be compared.
        folder: for checkpoints and TensorBoard; a run that was stopped continues from there.
    """
    torch.manual_seed(seed)
    labels = torch.unique(labels, return_inverse=True)[1]
    if recipe.mirror:
        pictures = torch.cat([pictures, pictures.flip(-1)])
        labels = torch.cat([labels, labels + int(labels.max()) + 1])
    learner = Learner(build(recipe.spec), int(labels.max()) + 1, recipe.spec.dim)
    if old is not None:
        learner.network.load_state_dict(old.state_dict())
        learner.people = nn.Parameter(_means(old, pictures, labels), requires_grad=False)
    config = recipe.config(seed)
    per_epoch = max(1, len(labels) // config.batch_size)
    trainer = Trainer(
        learner,
        make_loss(recipe, old),
        list(zip(pictures, labels, strict=True)),
        [] if held_out is None else list(zip(*held_out, strict=True)),
        config,
        folder,
        order=balanced_order(labels, recipe.people, recipe.pictures, per_epoch, seed),
        about={"kind": recipe.spec.kind, "mining": recipe.mining},
    )
    history = trainer.run(show=show)
    return learner.network.eval(), history


@torch.no_grad()
def _means(network: nn.Module, pictures: Tensor, labels: Tensor) -> Tensor:
    """The mean vector of each person (people, dim)."""
    vectors = torch.cat([network(part) for part in pictures.split(100)])
    return normalize(torch.zeros(int(labels.max()) + 1, vectors.shape[1]).index_add_(0, labels, vectors), dim=-1)


def make_loss(
    recipe: Recipe, old: nn.Module | None = None
) -> Callable[[nn.Module, Sequence[Any]], tuple[Tensor, float]]:
    """The trainer's loss: triplets of a batch, and in training the classification."""
    triplets = TripletLoss(recipe.mining)

    def loss(model: nn.Module, batch: Sequence[Any]) -> tuple[Tensor, float]:
        pictures = torch.stack([picture for picture, _ in batch])
        labels = torch.stack([label for _, label in batch])
        if model.training:
            pictures = augment(pictures, recipe.augmentation)
        vectors, cosines = model(pictures)
        if old is None:
            found = triplets(vectors, labels)
        else:
            with torch.no_grad():
                before = old(pictures)
            found = triplets(torch.cat([vectors, before]), labels.repeat(2))
            found = found + BOND * (vectors - before).square().sum(-1).mean()
        if model.training and recipe.classes:
            found = found + recipe.classes * cross_entropy(SCALE * cosines, labels)
        return found, 1.0

    return loss
