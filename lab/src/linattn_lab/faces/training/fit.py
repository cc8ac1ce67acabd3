"""Trains an embedder on a folder of people; held-out people set its threshold."""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image

from ...data import orl_faces
from ..embedder import Embedder, whitening_of
from ..images import Pictures, fit, read_folder, to_tensor
from ..networks import NetworkSpec
from ..verification.confidence import calibrate
from ..verification.metrics import accuracy, best_threshold, pairs_of, val_at_far
from .recipe import VERSION, Recipe, train


def read(photos: str, spec: NetworkSpec) -> Pictures:
    """Images of a folder in a network's size, or the ORL faces by the name `orl` where there is no such folder."""
    if photos != "orl" or Path(photos).is_dir():
        return read_folder(photos, spec.size, spec.channels)
    faces, people = orl_faces()
    found = Pictures()
    for at, (face, person) in enumerate(zip(faces, people, strict=True)):
        found.paths.append(Path(f"s{person + 1}/{at % 10 + 1}.pgm"))
        found.people.append(f"s{person + 1}")
        found.images.append(fit(Image.fromarray(face), spec.size, spec.channels))
    return found


def learn(
    recipe: Recipe, pictures: Pictures, held_out: float, seed: int, folder: str | os.PathLike[str], show: bool = True
) -> Embedder:
    """Trains on most people; the others choose the threshold and give the figures in `about`.

    Args:
        held_out: share of the people with two images or more; at least two people.
        folder: for checkpoints, in `training` beneath it; other settings or people begin anew.
    """
    labels, names = pictures.labels()
    counts = torch.bincount(labels, minlength=len(names))
    several = torch.nonzero(counts > 1).flatten()
    if len(several) < 4:
        raise ValueError(
            f"training needs at least 4 people with two pictures or more (2 to learn from, 2 to hold out), got {len(several)}."
        )
    if not 0 < held_out < 1:
        raise ValueError(f"--held-out must be between 0 and 1, got {held_out}.")
    count = min(max(2, round(held_out * len(several))), len(several) - 2)
    lot = several[torch.randperm(len(several), generator=torch.Generator().manual_seed(seed))[:count]]
    out = torch.isin(labels, lot)
    known = ~out & torch.isin(labels, several)
    spec = recipe.spec
    tensor = to_tensor(pictures.images, spec.size, spec.channels)
    network, _ = train(
        recipe,
        tensor[known],
        labels[known],
        seed,
        held_out=(tensor[out], labels[out]),
        folder=Path(folder) / "training" / _name(recipe, [names[i] for i in labels[known].tolist()], seed),
        show=show,
    )
    embedder = Embedder(spec, network, whitening_of(network, tensor[known], labels[known], recipe.augmentation))
    pairs = pairs_of(embedder.embed_tensor(tensor[out]).numpy(), labels[out].numpy())
    embedder.threshold = best_threshold(pairs)
    embedder.about = {
        "people": len(torch.unique(labels[known])),
        "pictures": int(known.sum()),
        "held_out_people": count,
        "val_at_far_1e-2": val_at_far(pairs, 1e-2),
        "accuracy": accuracy(pairs, embedder.threshold),
        "calibration": calibrate(pairs.distance[pairs.same], pairs.distance[~pairs.same]),
        "mining": recipe.mining,
        "steps": recipe.steps,
        "seed": seed,
    }
    return embedder


def _name(recipe: Recipe, people: list[str], seed: int) -> str:
    """The same for a training that may go on where it was stopped."""
    facts = [VERSION, asdict(recipe), people, seed]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
