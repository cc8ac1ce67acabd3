"""Embeds the images of a folder into an index; files whose digest is already in it are skipped."""

import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...commandline import progress
from ..embedder import Embedder
from ..images import open_image, scan, to_tensor
from ..text import counted, printable, short
from . import Face, FaceIndex, file_digest

BATCH = 64


@dataclass
class Tally:
    """Counts of what happened to the files of a folder."""

    added: int = 0
    known: int = 0  # their contents were there already
    renamed: int = 0  # known by another path, which is gone, or by another person
    removed: int = 0
    broken: list[tuple[Path, str]] = field(default_factory=list)
    doubtful: list[tuple[Path, Path]] = field(default_factory=list)  # the same contents in folders of two people
    unread: list[Path] = field(default_factory=list)  # folders too deep to be a person's

    def report(self) -> str:
        """Counts, and a line for each file that wants attention."""
        text = f"{counted(self.added, 'picture')} added"
        if self.known:
            text += f", {self.known} known already" + (f" ({self.renamed} renamed)" if self.renamed else "")
        if self.removed:
            text += f", {self.removed} removed"
        if self.broken:
            text += f", {len(self.broken)} skipped:"
            text += "".join(f"\n  {short(path)}: {reason}" for path, reason in self.broken)
        if any(path.suffix.lower() in (".heic", ".heif") for path, _ in self.broken):
            text += "\n(Pillow does not read HEIC by itself: save those as JPEG.)"
        if self.doubtful:
            text += "\nthe same contents with two people, counted for the first:"
            text += "".join(f"\n  {short(path)} is {short(other)}" for path, other in self.doubtful)
        if self.unread:
            text += f"\nfolders below those of people are not read: {', '.join(map(short, self.unread[:3]))}"
            text += ", ..." if len(self.unread) > 3 else ""
        return printable(text)


def files_of(folder: str | os.PathLike[str]) -> list[tuple[Path, str | None]]:
    """Files of a folder with their person; an index or a model that lies in it is left out."""
    files = scan(folder)
    own = {top for top in {path.parent for path, _ in files} if _is_ours(top)}
    found = [(path, person) for path, person in files if path.parent not in own]
    if not found:
        raise ValueError(
            f"there are no pictures in {folder}: they should lie in it, or in a folder of it for each person; "
            "deeper folders are not read."
        )
    return found


def add_folder(index: FaceIndex, folder: str | os.PathLike[str], embedder: Embedder, *, prune: bool = False) -> Tally:
    """Embeds the images of a folder that an index does not have yet. Each batch is on disk before the next begins.

    Args:
        prune: take out of the index what is no longer on disk.
    """
    tally = Tally(unread=_too_deep(folder))
    found: list[Face] = []
    for faces, embeddings in _embedded(files_of(folder), embedder, tally, index, found):
        added = index.add(faces, embeddings)
        tally.added += added
        tally.known += len(faces) - added  # another process was first
    now = {face.file: face.digest for face in found}
    tally.renamed = index.rename(_moved(index, found, now))
    tally.doubtful = _doubtful(found, {face.digest: face for face in index.faces})
    gone = {face.digest for face in index.faces if now.get(face.file, face.digest) != face.digest}  # overwritten since
    if prune:
        gone |= {face.digest for face in index.faces if not Path(face.file).is_file()}
    tally.removed = index.remove(gone)
    return tally


def read_faces(folder: str | os.PathLike[str], embedder: Embedder) -> tuple[list[Face], np.ndarray, Tally]:
    """The images of a folder and their embeddings (N, dim), kept nowhere."""
    tally = Tally(unread=_too_deep(folder))
    found: list[Face] = []
    faces: list[Face] = []
    parts = [np.empty((0, embedder.dim), np.float32)]
    for some, embeddings in _embedded(files_of(folder), embedder, tally, (), found):
        faces += some
        parts.append(embeddings)
    tally.added = len(faces)
    tally.doubtful = _doubtful(found, {face.digest: face for face in faces})
    return faces, np.concatenate(parts), tally


def _embedded(
    files: Iterable[tuple[Path, str | None]],
    embedder: Embedder,
    tally: Tally,
    known: Container[str],
    found: list[Face],
) -> Iterator[tuple[list[Face], np.ndarray]]:
    """Batches of faces whose digests are not known yet, with their embeddings; `found` takes all faces on the way."""
    batch: list[Face] = []
    seen: set[str] = set()
    for path, person in progress(files, desc="pictures", unit="picture"):
        try:
            face = Face(str(path.absolute()), person, file_digest(path))
        except OSError as error:
            tally.broken.append((path, error.strerror or str(error)))
            continue
        found.append(face)
        if face.digest in seen or face.digest in known:
            tally.known += 1
        else:
            batch.append(face)
        seen.add(face.digest)
        if len(batch) == BATCH:
            yield embed_faces(batch, embedder, tally)
            batch = []
    if batch:
        yield embed_faces(batch, embedder, tally)


def read_picture(file: str | os.PathLike[str], embedder: Embedder) -> Tensor:
    """An image as the network takes it, (1, channels, height, width). Raises ValueError if it cannot be read."""
    return to_tensor([open_image(file)], embedder.spec.size, embedder.spec.channels)


def embed_faces(batch: Iterable[Face], embedder: Embedder, tally: Tally) -> tuple[list[Face], np.ndarray]:
    """Faces of a batch that can be read, and their embeddings (N, dim); the others go into the tally.

    Images are made small one by one: a batch of photographs at full size would fill the memory.
    """
    faces, small = [], []
    for face in batch:
        try:
            small.append(read_picture(face.file, embedder))
        except ValueError as error:
            tally.broken.append((Path(face.file), str(error.__cause__ or error)))
            continue
        faces.append(face)
    parts = [torch.cat(small[i : i + BATCH]) for i in range(0, len(small), BATCH)]
    return faces, torch.cat([torch.empty(0, embedder.dim), *map(embedder.embed_tensor, parts)]).numpy()


def _moved(index: FaceIndex, found: list[Face], now: dict[str, str]) -> list[Face]:
    """Faces whose file or person in the index is no longer right; where the new place has no name, the old one stays."""
    moved: dict[str, Face] = {}
    for face in found:
        if face.digest not in index or face.digest in moved:
            continue
        old = index.face(face.digest)
        left = now.get(old.file, old.digest) != old.digest or not Path(old.file).is_file()
        if left or face.file == old.file:
            moved[face.digest] = face._replace(person=face.person or old.person)
    return list(moved.values())


def _doubtful(found: list[Face], kept: dict[str, Face]) -> list[tuple[Path, Path]]:
    """Files whose contents are kept under another person."""
    return [
        (Path(face.file), Path(kept[face.digest].file))
        for face in found
        if face.digest in kept and face.person and kept[face.digest].person not in (None, face.person)
    ]


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a model or an index."""
    if (folder / "embedder.safetensors").is_file():
        return True
    return (folder / "index.json").is_file() and b'"faces_index"' in (folder / "index.json").read_bytes()


def _too_deep(folder: str | os.PathLike[str]) -> list[Path]:
    return sorted(path for path in Path(folder).glob("[!.]*/[!.]*") if path.is_dir())
