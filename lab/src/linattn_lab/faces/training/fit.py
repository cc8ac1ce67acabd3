"""Trains an embedder on a folder of people; people that a network did not see choose its threshold."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ...data import orl_faces
from ..embedder import Embedder, whitening_of
from ..images import Pictures, fit, read_folder, to_tensor
from ..networks import NetworkSpec
from ..verification.confidence import calibrate
from ..verification.cut import choose_cut
from ..verification.metrics import Pairs, cross_pairs, join, pairs_of
from ..verification.threshold import choose_threshold
from .recipe import VERSION, Recipe, train


@dataclass(frozen=True)
class Choice:
    """How the threshold is chosen.

    Args:
        far: the rate of false accepts that is wanted.
        folds: the people are parted into as many groups, each is held out from a training of its own, and the model that is
            kept is trained on all of them.
        held_out: instead, a share of the people that the model is not trained on; 0 is none.
    """

    far: float = 1e-2
    folds: int = 3
    held_out: float = 0.0


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


def groups_of(people: Tensor, choice: Choice, seed: int) -> list[Tensor]:
    """People to hold out, group by group; each has two or more, and so have those that are left to train on."""
    if len(people) < 4:
        raise ValueError(
            "training needs at least 4 people with two pictures or more (2 to learn from, 2 to hold out; beside an --old "
            f"model, people that it does not know), got {len(people)}."
        )
    lot = people[torch.randperm(len(people), generator=torch.Generator().manual_seed(seed))]
    if choice.held_out:
        if not 0 < choice.held_out < 1:
            raise ValueError(f"--held-out must be between 0 and 1, got {choice.held_out}.")
        return [lot[: min(max(2, round(choice.held_out * len(lot))), len(lot) - 2)]]
    return list(lot.tensor_split(max(2, min(choice.folds, len(lot) // 2))))


class Fitter:
    """Trainings on parts of some images, each checkpointed under a folder.

    Args:
        old: an embedder whose vectors the new ones are to be compared with.
    """

    def __init__(self, recipe: Recipe, pictures: Pictures, seed: int, old: Embedder | None = None):
        self.recipe, self.seed, self.old = recipe, seed, old
        self.labels, self.names = pictures.labels()
        self.tensor = to_tensor(pictures.images, recipe.spec.size, recipe.spec.channels)

    def embedder(self, chosen: Tensor, folder: Path | None, show: bool) -> Embedder:
        """Trained on the chosen images (N,) of all."""
        pictures, labels = self.tensor[chosen], self.labels[chosen]
        old = None if self.old is None else self.old.network
        name = self._name([self.names[i] for i in labels.tolist()])
        network, _ = train(
            self.recipe,
            pictures,
            labels,
            self.seed,
            old=old,
            folder=None if folder is None else folder / "training" / name,
            show=show,
        )
        if self.old is None:
            whitening = whitening_of(network, pictures, labels, self.recipe.augmentation)
        else:  # the old vectors went through the old matrix: the same one keeps the new ones in their space
            whitening = self.old.whitening
        return Embedder(self.recipe.spec, network, whitening)

    def _name(self, people: list[str]) -> str:
        """The same for a training that may go on where it was stopped."""
        facts = [VERSION, asdict(self.recipe), people, self.seed, None if self.old is None else self.old.digest()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def learn(
    recipe: Recipe,
    pictures: Pictures,
    choice: Choice,
    seed: int,
    folder: str | os.PathLike[str] | None,
    *,
    old: Embedder | None = None,
    show: bool = True,
) -> Embedder:
    """An embedder whose threshold and cut come from people that were held out, with what is known of them in `about`.

    Args:
        choice: the rate of false accepts, and who is held out.
        folder: for checkpoints, in `training` beneath it; other settings or people begin anew.
        old: an embedder to stay comparable with. Only people that it was not trained on are held out.
    """
    fitter = Fitter(recipe, pictures, seed, old)
    labels, names = fitter.labels, fitter.names
    counts = torch.bincount(labels, minlength=len(names))
    several = torch.nonzero(counts > 1).flatten()
    seen = set() if old is None else set(old.about.get("trained_on", []))
    groups = groups_of(torch.tensor([i for i in several.tolist() if names[i] not in seen]), choice, seed)
    usable = torch.isin(labels, several)
    top = None if folder is None else Path(folder)
    pairs: list[Pairs] = []
    across: list[Pairs] = []
    before: list[Pairs] = []
    vectors = []
    for group in groups:
        out = torch.isin(labels, group)
        embedder = fitter.embedder(usable & ~out, top, show)
        rows, people = embedder.embed_tensor(fitter.tensor[out]).numpy(), labels[out].numpy()
        vectors.append((rows, people))
        pairs.append(pairs_of(rows, people))
        if old is not None:
            older = old.embed_tensor(fitter.tensor[out]).numpy()
            across.append(cross_pairs(rows, older, people))
            before.append(pairs_of(older, people))
    if not choice.held_out:
        embedder = fitter.embedder(usable, top, show)
    threshold, cut = choose_threshold(pairs, choice.far), choose_cut(vectors)
    embedder.threshold, embedder.cut = threshold.value, cut.value
    every = join(pairs)
    known = usable & ~torch.isin(labels, groups[0]) if choice.held_out else usable
    trained_on = {names[i] for i in labels[known].tolist()}
    embedder.about = {
        "people": len(trained_on),
        "pictures": int(known.sum()),
        "trained_on": sorted(trained_on | seen),
        "held_out_people": sum(map(len, groups)),
        "folds": len(groups),
        **threshold.facts(),
        "clusters": cut.facts(),
        "calibration": calibrate(every.distance[every.same], every.distance[~every.same]),
        "mining": recipe.mining,
        "steps": recipe.steps,
        "seed": seed,
        "said": f"{threshold.text()}\n{cut.text()}",
    }
    if old is not None:
        mixed, alone = choose_threshold(across, choice.far), choose_threshold(before, choice.far)
        embedder.about["old"] = {"network": old.digest(), "threshold": mixed.value, **mixed.facts()}
        embedder.about["old"]["val_old_old"] = alone.val
        embedder.about["said"] += (
            f"\nnew images against old vectors: {mixed.text()}\n"
            f"pairs of one person accepted at that rate: new-new {threshold.val:.3f}, new-old {mixed.val:.3f}, "
            f"old-old {alone.val:.3f}"
        )
    return embedder
