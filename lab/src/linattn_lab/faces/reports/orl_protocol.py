"""The ORL protocol: four folds of ten unseen people; trainings are jobs for worker processes, cached in a folder."""

import hashlib
import io
import json
import multiprocessing
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from ...data import orl_faces
from ...data.orl import PEOPLE, PICTURES
from ...training.lock import training_lock
from ...training.tensor_files import read_tensors, write_tensors
from ...workers import start_worker
from ..embedder import Embedder, harmonic_whitening_of, whitening_of
from ..images import to_tensor
from ..training.recipe import VERSION, Recipe, train
from ..verification.metrics import Pairs, pairs_of

FOLDS = 4
QUALITIES = (10, 20, 50, 90)


class Runnable(Hashable, Protocol):
    """What a worker can do and keep."""

    def name(self) -> str: ...

    def run(self) -> dict[str, Tensor]: ...


J = TypeVar("J", bound=Runnable)


@dataclass(frozen=True)
class Job:
    """One training: what, on which people, tested on which.

    Args:
        recipe: the network and its training.
        fold: people 10 fold to 10 fold + 9 are tested, of the others are trained.
        seed: of everything random.
        people: how many to train on; 0 is all.
        old: trained first, on every second of these people, without whitening, frozen, and made comparable with
            (harmonic embeddings).
        jpeg: test images also after JPEG at the QUALITIES.
    """

    recipe: Recipe
    fold: int
    seed: int
    people: int = 0
    old: Recipe | None = None
    jpeg: bool = False

    def name(self) -> str:
        """The same for the same training, whatever computes it."""
        return hashlib.sha256(json.dumps([VERSION, asdict(self)], sort_keys=True).encode()).hexdigest()[:20]

    def run(self) -> dict[str, Tensor]:
        return run_job(self)


def run_job(job: Job) -> dict[str, Tensor]:
    """Vectors of the test images (100, dim): `vectors`, `plain` before whitening, `old` and `jpeg-<quality>` as asked.

    `seconds` is the time of one core that it took.
    """
    start = time.process_time()
    faces, people = orl_faces()
    images, labels = [Image.fromarray(face) for face in faces], torch.from_numpy(people).long()
    fold = torch.from_numpy(fold_of(people))
    chosen = fold != job.fold
    if job.people:  # at random, another lot for each seed
        known = torch.unique(labels[chosen])
        lot = torch.randperm(len(known), generator=torch.Generator().manual_seed(job.seed))[: job.people]
        chosen &= torch.isin(labels, known[lot])
    tested = [image for image, test in zip(images, (fold == job.fold).tolist(), strict=True) if test]
    found = {}
    old = None
    if job.old is not None:
        half = chosen & torch.isin(labels, torch.unique(labels[chosen])[::2])
        old = Embedder(job.old.spec, fit(job.old, images, labels, half, job.seed).network)
        found["old"] = old.embed(tested)
    embedder = fit(job.recipe, images, labels, chosen, job.seed, old)
    found["vectors"] = embedder.embed(tested)
    found["plain"] = normalize(torch.linalg.solve(embedder.whitening, found["vectors"], left=False), dim=-1)
    if job.jpeg:
        found |= {f"jpeg-{q}": embedder.embed([compressed(image, q) for image in tested]) for q in QUALITIES}
    return found | {"seconds": torch.tensor(time.process_time() - start)}


def fit(
    recipe: Recipe, images: list[Image.Image], labels: Tensor, chosen: Tensor, seed: int, old: Embedder | None = None
) -> Embedder:
    """Trains on the chosen images; beside an old embedder, so that vectors of both can be compared."""
    spec = recipe.spec
    pictures = to_tensor(
        [image for image, keep in zip(images, chosen.tolist(), strict=True) if keep], spec.size, spec.channels
    )
    labels = labels[chosen]
    network, _ = train(recipe, pictures, labels, seed, old=None if old is None else old.network)
    if old is None:
        whitening = whitening_of(network, pictures, labels, recipe.augmentation)
    else:
        whitening = harmonic_whitening_of(network, pictures, labels, recipe.augmentation)
    return Embedder(spec, network, whitening)


def compressed(image: Image.Image, quality: int) -> Image.Image:
    """The image after JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert(image.mode)


def run_jobs(
    jobs: Iterable[J], folder: Path, workers: int, show: Callable[..., Iterable[Any]] = lambda items, **_: items
) -> dict[J, dict[str, np.ndarray]]:
    """All results, those already in the folder read from there; `workers` processes of one thread each do the rest."""
    wanted = list(dict.fromkeys(jobs))
    with training_lock(folder):
        missing = [job for job in wanted if not (folder / f"{job.name()}.safetensors").is_file()]
        if missing:
            _run_missing(missing, folder, workers, show)
    return {job: _read(folder / f"{job.name()}.safetensors") for job in wanted}


def _run_missing(jobs: Sequence[Runnable], folder: Path, workers: int, show: Callable[..., Iterable[Any]]) -> None:
    orl_faces()  # fetched once, by one process
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(1,)) as pool:
        waiting = [pool.submit(_keep, job, folder) for job in jobs]
        for done in show(as_completed(waiting), total=len(waiting), desc="trainings"):
            done.result()


def _keep(job: Runnable, folder: Path) -> None:
    write_tensors(folder / f"{job.name()}.safetensors", job.run(), {"version": "1", "job": repr(job)})


def _read(path: Path) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in read_tensors(path)[0].items()}


def over_folds(recipe: Recipe, seed: int, **options: Any) -> list[Job]:
    """A job for each fold."""
    return [Job(recipe, fold, seed, **options) for fold in range(FOLDS)]


def fold_of(people: np.ndarray) -> np.ndarray:
    """In which fold a person is tested: ten neighbours by number."""
    return people // (PEOPLE // FOLDS)


def people_of(fold: int) -> np.ndarray:
    """Whose the test images of a fold are."""
    people = np.repeat(np.arange(PEOPLE), PICTURES)
    return people[fold_of(people) == fold]


def tested_pairs(results: dict[Job, dict[str, np.ndarray]], jobs: list[Job], part: str) -> list[Pairs]:
    """Pairs of each fold."""
    return [pairs_of(results[job][part], people_of(job.fold)) for job in jobs]


def variant(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with changes; those of its network go by their own name."""
    spec = {name: changes.pop(name) for name in ("kind", "size", "dim") if name in changes}
    return replace(recipe, spec=replace(recipe.spec, **spec), **changes)
