"""From files to embeddings: digests first, so that what is known is neither read nor computed again."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from .._commandline import progress
from .embedder import Embedder
from .images import open_image, scan, to_tensor
from .index import Face, FaceIndex, file_digest

BATCH = 64


@dataclass
class Tally:
    """What became of the files of a folder."""

    added: int = 0
    known: int = 0  # their contents were there already
    renamed: int = 0  # known by another path, which is gone, or by another person
    removed: int = 0
    broken: list[tuple[Path, str]] = field(default_factory=list)
    doubtful: list[tuple[Path, Path]] = field(default_factory=list)  # the same contents in folders of two people

    def report(self) -> str:
        """One line of counts, and one for each broken file."""
        text = f"{counted(self.added, 'picture')} added"
        if self.known:
            text += f", {self.known} known already" + (f" ({self.renamed} renamed)" if self.renamed else "")
        if self.removed:
            text += f", {self.removed} removed"
        if self.broken:
            text += f", {len(self.broken)} skipped:" + "".join(f"\n  {path}: {reason}" for path, reason in self.broken)
        if self.doubtful:
            text += "\nthe same contents with two people, counted for the first:"
            text += "".join(f"\n  {path} is {other}" for path, other in self.doubtful)
        if any(path.suffix.lower() in (".heic", ".heif") for path, _ in self.broken):
            text += "\n(Pillow does not read HEIC by itself: save those as JPEG.)"
        return printable(text)


def counted(number: int, noun: str, many: str = "") -> str:
    """1 picture, 2 pictures; 1 person, 2 people."""
    return f"{number} {noun if number == 1 else many or noun + 's'}"


def printable(text: str) -> str:
    """Text that every terminal and file takes: bytes of a file's name that are no UTF-8 become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def files_of(folder: str | os.PathLike[str]) -> list[tuple[Path, str | None]]:
    """Files of a folder with their person; an index or a model that lies in it is left out."""
    files = scan(folder)
    tops = {path.parent for path, _ in files}
    own = {top for top in tops if (top / "index.json").is_file() or (top / "embedder.json").is_file()}
    found = [(path, person) for path, person in files if path.parent not in own]
    if not found:
        raise ValueError(
            f"there are no pictures in {folder}: they should lie in it, or in a folder of it for each person; "
            "deeper folders are not read."
        )
    return found


def add_folder(index: FaceIndex, folder: str | os.PathLike[str], embedder: Embedder, *, prune: bool = False) -> Tally:
    """Embeds the pictures of a folder that an index does not have yet. Each batch is on disk before the next begins.

    Args:
        prune: take out of the index what is no longer on disk.
    """
    tally = Tally()
    moved: list[Face] = []
    for faces, embeddings in _embedded(files_of(folder), embedder, tally, index, moved):
        tally.added += index.add(faces, embeddings)
    tally.renamed = index.rename(moved)
    if prune:
        tally.removed = index.remove(face.digest for face in list(index.faces) if not Path(face.file).is_file())
    return tally


def read_faces(folder: str | os.PathLike[str], embedder: Embedder) -> tuple[list[Face], np.ndarray, Tally]:
    """The pictures of a folder and their embeddings (N, dim), kept nowhere."""
    tally = Tally()
    faces: list[Face] = []
    parts = [np.empty((0, embedder.dim), np.float32)]
    for some, embeddings in _embedded(files_of(folder), embedder, tally, None, []):
        faces += some
        parts.append(embeddings)
    tally.added = len(faces)
    return faces, np.concatenate(parts), tally


def _embedded(
    files: Iterable[tuple[Path, str | None]],
    embedder: Embedder,
    tally: Tally,
    index: FaceIndex | None,
    moved: list[Face],
) -> Iterator[tuple[list[Face], np.ndarray]]:
    """Batches of faces that are new to the index, with their embeddings; `tally` and `moved` are filled on the way."""
    batch: list[Face] = []
    seen: dict[str, Face] = {}
    for path, person in progress(files, desc="pictures", unit="picture"):
        try:
            face = Face(str(path.absolute()), person, file_digest(path))
        except OSError as error:
            tally.broken.append((path, error.strerror or str(error)))
            continue
        old = seen.get(face.digest)
        if old is None and index is not None and face.digest in index:
            old = index.face(face.digest)
            if old.file == face.file or not Path(old.file).is_file():
                old = Face(face.file, face.person or old.person, face.digest)
                moved.append(old)
        if old is None:
            batch.append(face)
        else:
            tally.known += 1
            if None not in (old.person, face.person) and old.person != face.person:
                tally.doubtful.append((path, Path(old.file)))
        seen[face.digest] = old or face
        if len(batch) == BATCH:
            yield embed_faces(batch, embedder, tally)
            batch = []
    if batch:
        yield embed_faces(batch, embedder, tally)


def embed_faces(batch: Iterable[Face], embedder: Embedder, tally: Tally) -> tuple[list[Face], np.ndarray]:
    """Faces of a batch that can be read, and their embeddings (N, dim); the others go into the tally.

    Pictures are made small one by one: a batch of photographs at full size would fill the memory.
    """
    faces, small = [], []
    for face in batch:
        try:
            small.append(to_tensor([open_image(face.file)], embedder.spec.size, embedder.spec.channels))
        except ValueError as error:
            tally.broken.append((Path(face.file), str(error.__cause__ or error)))
            continue
        faces.append(face)
    parts = [torch.cat(small[i : i + BATCH]) for i in range(0, len(small), BATCH)]
    return faces, torch.cat([torch.empty(0, embedder.dim), *map(embedder.embed_tensor, parts)]).numpy()
