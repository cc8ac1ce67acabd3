"""The files of a face index, and the rules by which several processes share them.

    index.json                          the manifest: settings (dimension, storage, network, threshold) and the list of shards
    index.lock                          held by the one process that is writing
    shard-000000-1f0c....safetensors    up to 4096 embeddings, float32 or int8
    shard-000000-1f0c....json           file, person and digest of each

A shard never changes: its name is a hash of its contents. A writer takes the lock, reads the manifest, writes new shards
beside the old ones, replaces the manifest in one step (the commit), and deletes the shards that it no longer lists. So a
process killed at any point leaves the index as it was before or after the commit. Readers need no lock: if a shard of the
manifest they read is gone, a newer manifest is there.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from linattn._files import write_file

FORMAT = 2
MANIFEST, LOCK = "index.json", "index.lock"
STORAGES = {"float32": np.float32, "int8": np.int8}
LOCK_SECONDS = 600.0  # a writer holds the lock for the writing of a few files
READ_ATTEMPTS = 1000  # each repeated attempt means that another process has committed meanwhile
_SHARD_NAME = re.compile(r"shard-\d{6,}-[0-9a-f]{16}")


class Face(NamedTuple):
    """An image in an index: its file, who it shows (None if unknown), and the digest of the file's contents."""

    file: str
    person: str | None
    digest: str


@dataclass
class Shard:
    """Faces and their embeddings as stored; `vectors` is None until they are read."""

    name: str
    faces: list[Face]
    vectors: np.ndarray | None = None

    @property
    def number(self) -> int:
        return int(self.name.split("-")[1])


class ShardReplaced(Exception):
    """Another process has replaced a shard since the manifest was read: read the manifest again."""


class ShardFolder:
    """Reads and writes the files of one index."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = Path(folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the writers' lock; waits for other writers, in this process and in others."""
        lock = FileLock(self.path / LOCK)
        try:
            lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.002)
        except Timeout:
            raise ValueError(
                f"another process has been writing to {self.path} for {LOCK_SECONDS:.0f} seconds: "
                "wait until it has ended, or end it."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def manifest(self) -> tuple[dict[str, Any], list[str]]:
        """Settings and names of the shards, in order."""
        path = self.path / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{self.path} is no index of faces: make one with `linattn lab faces embed`.") from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}).") from None
        version = found.get("faces_index") if isinstance(found, dict) else None
        if version != FORMAT:
            raise ValueError(
                f"{path} is no index of faces that this version reads (format {version}, not {FORMAT}): "
                "embed the pictures into a new folder."
            )
        shards = found.pop("shards", None)
        if not isinstance(shards, list) or not all(isinstance(x, str) and _SHARD_NAME.fullmatch(x) for x in shards):
            raise ValueError(f"{path} is damaged (its list of shards is {shards!r:.80}).")
        return found, shards

    def read(self, known: Mapping[str, Shard]) -> list[Shard]:
        """The shards of the newest manifest; those already known by name are not read again."""
        names = self.manifest()[1]
        for _ in range(READ_ATTEMPTS):
            try:
                return [known.get(name) or self._read_faces(name) for name in names]
            except FileNotFoundError:
                before, names = names, self.manifest()[1]
                if names == before:  # no writer took the files away: they were deleted by hand, as _damaged advises
                    names = [name for name in names if (self.path / f"{name}.json").exists()]
        raise ValueError(f"{self.path} changes faster than it can be read: try again.")

    def commit(self, settings: dict[str, Any], shards: Sequence[Shard]) -> None:
        """Makes these the shards of the index, for every process; files of others are deleted. Needs the lock."""
        names = [shard.name for shard in shards]
        text = json.dumps({**settings, "shards": names}, indent=2, allow_nan=False) + "\n"
        self._write(MANIFEST, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        self._sync_folder()
        kept = set(names)
        left_by_a_kill = self.path.glob(".linattn-*.safetensors")  # only a writer makes these, and we are the writer
        for path in [*self.path.glob("shard-*.*"), *left_by_a_kill]:
            if path.stem not in kept:
                path.unlink(missing_ok=True)

    def write(self, number: int, faces: list[Face], stored: np.ndarray) -> Shard:
        """Writes a shard that counts once it is committed. Needs the lock."""
        lines = ",\n".join(json.dumps(face._asdict()) for face in faces)
        text = f'{{"faces": [\n{lines}\n]}}\n'
        vectors = np.ascontiguousarray(stored)
        digest = hashlib.sha256(text.encode())
        digest.update(vectors.tobytes())
        name = f"shard-{number:06d}-{digest.hexdigest()[:16]}"
        self._write(f"{name}.safetensors", lambda temporary: save_file({"embeddings": vectors}, temporary))
        self._write(f"{name}.json", lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return Shard(name, faces, vectors)

    def vectors(self, shard: Shard, settings: dict[str, Any]) -> np.ndarray:
        """Embeddings of a shard as stored. Raises ShardReplaced if another process has replaced it."""
        if shard.vectors is None:
            path = self.path / f"{shard.name}.safetensors"
            try:
                found = load_file(path)["embeddings"]
            except FileNotFoundError as error:
                if shard.name not in self.manifest()[1]:
                    raise ShardReplaced from None
                raise _damaged(path, error) from None
            except (OSError, SafetensorError, KeyError) as error:
                raise _damaged(path, error) from None
            shape = (len(shard.faces), settings["dim"])
            if found.shape != shape or found.dtype != STORAGES[settings["storage"]]:
                raise _damaged(path, f"{found.dtype} {found.shape} instead of {shape}")
            shard.vectors = found
        return shard.vectors

    def _read_faces(self, name: str) -> Shard:
        path = self.path / f"{name}.json"
        try:
            return Shard(name, [Face(**face) for face in json.loads(path.read_text(encoding="utf-8"))["faces"]])
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from None

    def _write(self, name: str, fill: Callable[[Path], object]) -> None:
        """A file, whole or not at all, that has reached the disk on return."""

        def fill_and_sync(temporary: Path) -> None:
            fill(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())

        write_file(self.path / name, fill_and_sync)

    def _sync_folder(self) -> None:
        if os.name == "posix":  # elsewhere a folder cannot be opened
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _damaged(path: Path, reason: object) -> ValueError:
    both = path.with_suffix(".*")
    return ValueError(f"{path} is damaged ({reason}): delete {both} and run `linattn lab faces embed` again.")
