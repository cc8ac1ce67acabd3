"""Measures prediction depth: probes at every point of a network, one point at a time."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..commandline import progress
from ..images import Part, scores
from ..training.tensor_files import read_tensors, write_tensors
from .depth import prediction_depth
from .knn_probe import vote
from .probes import activations, check_points, points


@dataclass
class Measured:
    """What one network and its probes said of some pictures.

    probes: classes (points, N); network: classes (N,); sureness: the network's probability of its class (N,);
    places: of the images in the set they are from (N,); labels: their true classes (N,).
    """

    probes: Tensor
    network: Tensor
    sureness: Tensor
    places: Tensor
    labels: Tensor

    @cached_property
    def depth(self) -> Tensor:
        return prediction_depth(self.probes, self.network)

    @property
    def right(self) -> Tensor:
        return self.network == self.labels


def measure(
    model: nn.Module,
    references: Part,
    queries: Sequence[Part],
    *,
    at: Sequence[str] | None = None,
    k: int = 30,
    title: str = "probes",
) -> list[Measured]:
    """What the network and its probes say of each of the query parts; the references are images it was trained on.

    Args:
        at: names of the points, as in `model.named_modules()`, and "input"; by default `points(model)`.
        k: neighbours that vote.
        title: of the progress bar.
    """
    names = points(model) if at is None else tuple(at)
    check_points(model, names)
    images = torch.cat([part.images for part in queries])
    said = scores(model, images).softmax(1)
    found = []
    for name in progress(names, desc=title, unit="point"):
        wanted = torch.cat(list(activations(model, images, name)))
        known = activations(model, references.images, name)
        found.append(vote(wanted, known, references.labels, k=k))
    sureness, network = said.max(1)
    sizes = [len(part) for part in queries]
    parts = (torch.stack(found).split(sizes, 1), network.split(sizes), sureness.split(sizes))
    return [
        Measured(probes, told, sure, torch.arange(len(part)), part.labels)
        for probes, told, sure, part in zip(*parts, queries, strict=True)
    ]


def save_measured(measured: Measured, path: str | os.PathLike[str]) -> None:
    fields = ("probes", "network", "sureness", "places", "labels")
    write_tensors(path, {name: getattr(measured, name) for name in fields}, {"version": "1"})


def load_measured(path: str | os.PathLike[str]) -> Measured:
    return Measured(**read_tensors(path)[0])
