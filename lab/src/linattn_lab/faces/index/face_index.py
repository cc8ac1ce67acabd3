"""An index of faces: embeddings with names, in a folder that grows and that several processes may use at once.

The files and how they are shared are in `shards`.
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .quantization import from_bytes, to_bytes
from .search import FAISS_BEYOND, nearest
from .shards import FORMAT, MANIFEST, STORAGES, Face, Shard, ShardFolder, ShardReplaced

__all__ = ["Face", "FaceIndex", "IndexExists", "file_digest"]

SHARD_ROWS = 4096
CHUNK_SHARDS = 8  # searched at once


class IndexExists(ValueError):
    """The folder holds an index already."""


def file_digest(path: str | os.PathLike[str]) -> str:
    """Names a file by its contents."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class FaceIndex:
    """Embeddings with names in a folder: FaceIndex(folder) opens one, `create` makes one.

    `faces` lists what is in it; the place of a face in that list is the place that `search` gives. Any number of
    processes and threads may add, rename, remove and search at once: writers wait for each other.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._files = ShardFolder(folder)
        self._mutex = threading.RLock()  # of the fields below; the lock of the files is for other processes
        self.settings: dict[str, Any] = self._files.manifest()[0]
        self._shards: list[Shard] = []
        self.faces: list[Face] = []
        self._place: dict[str, int] = {}  # digest -> place in `faces`
        self.reload()

    @classmethod
    def create(cls, folder: str | os.PathLike[str], dim: int, storage: str = "float32", **about: object) -> "FaceIndex":
        """A new, empty index. Raises IndexExists, a ValueError, if the folder holds one.

        Args:
            folder: created if missing; must hold no index yet.
            dim: length of the embeddings.
            storage: "float32" (4 bytes a number) or "int8" (1 byte).
            about: further facts for index.json: `network`, `model`, `threshold`.
        """
        if storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}.")
        top = Path(folder)
        top.mkdir(parents=True, exist_ok=True)
        files = ShardFolder(top)
        with files.writing():
            if (top / MANIFEST).exists():
                raise IndexExists(f"{top} holds an index already: open it, or choose another folder.")
            if any(top.glob("shard-*")):
                raise ValueError(f"{top} holds shards of an index without its {MANIFEST}: choose another folder.")
            files.commit({"faces_index": FORMAT, "dim": dim, "storage": storage, **about}, [])
        return cls(top)

    def reload(self) -> None:
        """Reads the names again, for what other processes have added."""
        with self._mutex:
            self._take(self._files.read({shard.name: shard for shard in self._shards}))

    def __len__(self) -> int:
        return len(self.faces)

    def __contains__(self, digest: object) -> bool:
        return digest in self._place

    def face(self, digest: str) -> Face:
        return self.faces[self._place[digest]]

    def add(self, faces: Sequence[Face], embeddings: np.ndarray) -> int:
        """Adds faces with their unit embeddings (N, dim) and returns how many were new. On return they are on disk."""
        embeddings = np.asarray(embeddings, np.float32)
        if embeddings.shape != (len(faces), self.settings["dim"]):
            raise ValueError(
                f"{len(faces)} faces need embeddings ({len(faces)}, {self.settings['dim']}), got {embeddings.shape}."
            )
        if not np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-3):
            raise ValueError("embeddings must have length one: divide each by its norm.")
        with self._writing():
            first = {face.digest: i for i, face in reversed(list(enumerate(faces))) if face.digest not in self}
            new = sorted(first.values())
            fresh, stored = [faces[i] for i in new], self._store(embeddings[new])
            shards = list(self._shards)
            for start in range(0, len(fresh), SHARD_ROWS):
                self._append(shards, fresh[start : start + SHARD_ROWS], stored[start : start + SHARD_ROWS])
            if fresh:
                self._files.commit(self.settings, shards)
                for face in fresh:
                    self.faces.append(face)
                    self._place[face.digest] = len(self.faces) - 1
                self._shards = shards
        return len(fresh)

    def rename(self, faces: Iterable[Face]) -> int:
        """Gives images that are in the index another file or person; returns how many changed."""
        faces = list(faces)
        with self._writing():
            changed = {face.digest: face for face in faces if face.digest in self and face != self.face(face.digest)}
            shards = list(self._shards)
            for i, shard in enumerate(shards):
                if any(face.digest in changed for face in shard.faces):
                    renamed = [changed.get(face.digest, face) for face in shard.faces]
                    shards[i] = self._files.write(shard.number, renamed, self._vectors(shard))
            if changed:
                self._commit(shards)
        return len(changed)

    def remove(self, digests: Iterable[str]) -> int:
        """Takes images out; returns how many."""
        digests = list(digests)
        with self._writing():
            gone = {digest for digest in digests if digest in self}
            shards = []
            for shard in self._shards:
                kept = [i for i, face in enumerate(shard.faces) if face.digest not in gone]
                if len(kept) == len(shard.faces):
                    shards.append(shard)
                elif kept:
                    faces = [shard.faces[i] for i in kept]
                    shards.append(self._files.write(shard.number, faces, self._vectors(shard)[kept]))
            if gone:
                self._commit(shards)
        return len(gone)

    def chunks(self) -> Iterator[np.ndarray]:
        """Unit embeddings float32 in portions, in the order of `faces`."""
        return self._chunks(self._all_vectors())

    def embeddings(self) -> np.ndarray:
        """All embeddings (N, dim) float32, in the order of `faces`."""
        return np.concatenate([np.empty((0, self.settings["dim"]), np.float32), *self.chunks()])

    def search(
        self, queries: np.ndarray, k: int = 5, *, faiss_beyond: int = FAISS_BEYOND
    ) -> tuple[np.ndarray, np.ndarray]:
        """Squared distances and places (Q, k) of the faces nearest to unit queries (Q, dim), nearest first: exact.

        Args:
            faiss_beyond: with more faces than this faiss computes, with the same result.
        """
        queries = np.asarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.settings["dim"]:
            raise ValueError(f"queries must be (Q, {self.settings['dim']}), got {queries.shape}.")
        stored = self._all_vectors()
        by_faiss = sum(map(len, stored)) > faiss_beyond
        portions = [queries[i : i + 256] for i in range(0, len(queries), 256)] or [queries]
        found = [nearest(portion, self._chunks(stored), k, by_faiss=by_faiss) for portion in portions]
        return np.concatenate([d for d, _ in found]), np.concatenate([p for _, p in found])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds both locks, with the index as it is on disk now."""
        with self._mutex, self._files.writing():
            if self._files.manifest()[1] != [shard.name for shard in self._shards]:
                self.reload()
            yield

    def _commit(self, shards: list[Shard]) -> None:
        self._files.commit(self.settings, shards)
        self._take(shards)

    def _take(self, shards: list[Shard]) -> None:
        """Makes these the shards. New lists are put in place of the old ones, which other threads may be reading."""
        faces = [face for shard in shards for face in shard.faces]
        place = {face.digest: i for i, face in enumerate(faces)}
        self._shards, self.faces, self._place = shards, faces, place

    def _append(self, shards: list[Shard], faces: list[Face], stored: np.ndarray) -> None:
        """Puts new faces, at most as many as a shard holds, into the last shard or into one more."""
        last = shards[-1] if shards else None
        if last is not None and len(last.faces) + len(faces) <= SHARD_ROWS:
            together = np.concatenate([self._vectors(last), stored])
            shards[-1] = self._files.write(last.number, [*last.faces, *faces], together)
        else:
            shards.append(self._files.write(0 if last is None else last.number + 1, faces, stored))

    def _all_vectors(self) -> list[np.ndarray]:
        """Embeddings of every shard as stored; follows other processes that replace shards meanwhile."""
        while True:
            try:
                return [self._vectors(shard) for shard in self._shards]
            except ShardReplaced:
                self.reload()

    def _vectors(self, shard: Shard) -> np.ndarray:
        return self._files.vectors(shard, self.settings)

    @staticmethod
    def _chunks(stored: list[np.ndarray]) -> Iterator[np.ndarray]:
        for start in range(0, len(stored), CHUNK_SHARDS):
            chunk = np.concatenate(stored[start : start + CHUNK_SHARDS])
            yield from_bytes(chunk) if chunk.dtype == np.int8 else chunk

    def _store(self, embeddings: np.ndarray) -> np.ndarray:
        return to_bytes(embeddings) if self.settings["storage"] == "int8" else embeddings
