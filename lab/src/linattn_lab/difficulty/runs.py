"""A folder of networks that differ in seed and in the held-out part of the training set."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from linattn._files import write_json

from ..images import ImageSet, Part, ResNet18, load, load_model, new_model, train
from ..images.training import DEFAULTS, folds
from ..training.config import TrainConfig
from ..training.lock import training_lock
from .measurement import Measured, load_measured, measure, save_measured
from .probes import points

SETTINGS = "run.json"


@dataclass
class Run:
    """What is trained, on what, and where it is kept.

    Each of `seeds` networks has a seed of its own and leaves one part of the training images out (none where there is but
    one network). Each is then judged on the test images, which shows what the seed matters, and on the part that it left
    out, so that every training image can be measured by a network that has not seen it.
    """

    folder: Path
    data: str = "shapes"
    pictures: int | None = None
    test: int | None = None
    side: int = 32
    seeds: int = 3
    width: int = 16
    stem: str = "imagenet"
    augment: bool = False
    config: TrainConfig = field(default_factory=lambda: DEFAULTS)

    def settings(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def claim(self) -> None:
        """Writes the settings into the folder, or raises ValueError if it was made with others."""
        path = self.folder / SETTINGS
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, self.settings())
            return
        old, new = json.loads(path.read_text()), json.loads(json.dumps(self.settings()))
        for name in new:
            if old.get(name) != new[name]:
                raise ValueError(
                    f"{self.folder} was made with {name} = {old.get(name)}, not {new[name]}: "
                    "choose another --folder, or the same settings."
                )

    def images(self) -> ImageSet:
        return load(self.data, train=self.pictures, test=self.test, seed=self.config.seed, side=self.side)

    def net_folder(self, net: int) -> Path:
        return self.folder / f"net{net}"

    def split(self, count: int, net: int) -> tuple[Tensor, Tensor]:
        """Places of the training images that a network learns from, and of those it leaves out."""
        if self.seeds == 1:
            return torch.arange(count), torch.arange(0)
        return folds(count, self.seeds, self.config.seed)[net]

    def train(self, images: ImageSet, *, show: bool = False) -> list[ResNet18]:
        """The networks, trained where they are not yet; what was stopped half-way goes on."""
        nets: list[ResNet18] = []
        with training_lock(self.folder):
            self.claim()
            for net in range(self.seeds):
                if not (self.net_folder(net) / "model.json").is_file():
                    self._train_one(images, net, show)
                nets.append(load_model(self.net_folder(net))[0])
        return nets

    def _train_one(self, images: ImageSet, net: int, show: bool) -> None:
        learnt = images.train.take(self.split(len(images.train), net)[0])
        seed = self.config.seed + net
        model = new_model(images, width=self.width, stem=self.stem, seed=seed)
        train(
            model,
            learnt,
            TrainConfig(**(asdict(self.config) | {"seed": seed})),
            self.net_folder(net),
            validation=min(1000, len(learnt) // 10),
            augment=self.augment,
            about={"classes": images.classes, "data": self.data},
            show=show,
        )


@dataclass
class Probing:
    """How depth is measured: neighbours that vote, references they are among, images of the test and of the held-out part."""

    k: int = 30
    references: int = 10000
    queries: int = 3000
    held_out: int = 1000


@dataclass
class Outcome:
    """What each network said of the test images (the same for all), and of the training images it had not seen."""

    points: tuple[str, ...]
    test: list[Measured]
    held_out: list[Measured]


def measure_run(run: Run, images: ImageSet, nets: list[ResNet18], probing: Probing) -> Outcome:
    """Measures every network, but for those that were measured in the same way before."""
    with training_lock(run.folder):  # another process would mix its own settings in
        return _measure_run(run, images, nets, probing)


def _measure_run(run: Run, images: ImageSet, nets: list[ResNet18], probing: Probing) -> Outcome:
    told, note = asdict(probing), run.folder / "probing.json"
    if not (note.is_file() and json.loads(note.read_text()) == told):
        for path in run.folder.glob("net*/measured-*.safetensors"):
            path.unlink()
        write_json(note, told)
    outcome = Outcome(points(nets[0]), [], [])
    for net, model in enumerate(nets):
        paths = [run.net_folder(net) / f"measured-{name}.safetensors" for name in ("test", "held-out")]
        if not all(path.is_file() for path in paths):
            for path, measured in zip(paths, _measure_one(run, images, net, model, probing), strict=True):
                save_measured(measured, path)
        outcome.test.append(load_measured(paths[0]))
        outcome.held_out.append(load_measured(paths[1]))
    return outcome


def _measure_one(run: Run, images: ImageSet, net: int, model: ResNet18, probing: Probing) -> list[Measured]:
    learnt, left_out = run.split(len(images.train), net)
    places = [torch.arange(len(images.test))[: probing.queries], left_out[: probing.held_out]]
    sources: list[Part] = [images.test, images.train]
    queries = [part.take(where) for part, where in zip(sources, places, strict=True)]
    references = images.train.take(learnt[: probing.references])
    found = measure(model, references, queries, k=probing.k, title=f"probing network {net + 1} of {run.seeds}")
    for measured, where in zip(found, places, strict=True):
        measured.places = where
    return found
