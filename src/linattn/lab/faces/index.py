"""An index of faces: embeddings with names, in a folder that grows and that a kill at any time leaves whole.

    index.json                          what the embeddings are: length, storage, network, threshold
    shard-000000-1f0c....safetensors    up to 4096 embeddings, float32 or int8
    shard-000000-1f0c....json           file, person and digest of each; a shard counts once this is there

Adding writes the last shard anew under another name as long as it has room, and removes the old one last: what a kill
leaves twice is read once, because a picture is known by the digest of its contents. Readers and writers need no lock.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..._files import write_file, write_json, write_text
from .nearest import FAISS_BEYOND, nearest
from .quantise import from_bytes, to_bytes

FORMAT = 1
SHARD_ROWS = 4096
CHUNK_SHARDS = 8  # searched at once
STORAGES = {"float32": np.float32, "int8": np.int8}


class Face(NamedTuple):
    """A picture of an index: where it was, who it shows (None: not known), and the digest of the file's contents."""

    file: str
    person: str | None
    digest: str


@dataclass
class _Shard:
    name: str
    faces: list[Face]
    rows: list[int]  # of the stored tensor; without those that an earlier shard has
    vectors: np.ndarray | None = None  # as stored, once read


def file_digest(path: str | os.PathLike[str]) -> str:
    """Names a file by its contents."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class FaceIndex:
    """Embeddings with names in a folder: FaceIndex(folder) opens one, `create` makes one.

    `faces` lists what is in it; the place of a face in that list is the place that `search` gives.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        path = self.folder / "index.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} is no index of faces: make one with `linattn lab faces embed`.")
        try:
            self.settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}).") from None
        if self.settings.get("faces_index") != FORMAT:
            found = self.settings.get("faces_index")
            raise ValueError(f"{path} is no index of faces that this version reads (format {found}, not {FORMAT}).")
        self.reload()

    @classmethod
    def create(cls, folder: str | os.PathLike[str], dim: int, storage: str = "float32", **about: Any) -> "FaceIndex":
        """A new, empty index.

        Args:
            folder: made if need be; must hold no index yet.
            dim: length of the embeddings.
            storage: "float32" (4 bytes a number) or "int8" (1 byte).
            about: further facts for index.json: `network`, `model`, `threshold`.
        """
        if storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}, got {storage!r}.")
        top = Path(folder)
        if (top / "index.json").exists():
            raise ValueError(f"{top} holds an index already: open it, or choose another folder.")
        top.mkdir(parents=True, exist_ok=True)
        write_json(top / "index.json", {"faces_index": FORMAT, "dim": dim, "storage": storage, **about})
        return cls(top)

    def reload(self) -> None:
        """Reads the names again, for what other processes have added."""
        for _ in range(10):
            try:
                self._take([self._read_names(path) for path in sorted(self.folder.glob("shard-*.json"))])
                return
            except FileNotFoundError:  # another process has replaced a shard since it was listed
                continue
        raise ValueError(f"{self.folder} changes faster than it can be read: try again.")

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
        self._follow()
        first = {face.digest: i for i, face in reversed(list(enumerate(faces))) if face.digest not in self}
        new = sorted(first.values())
        stored = self._store(embeddings[new])
        fresh = [faces[i] for i in new]
        for start in range(0, len(fresh), SHARD_ROWS):
            self._append(fresh[start : start + SHARD_ROWS], stored[start : start + SHARD_ROWS])
        return len(fresh)

    def rename(self, faces: Iterable[Face]) -> int:
        """Gives pictures that are in the index another file or person; returns how many changed."""
        changed = {face.digest: face for face in faces if face.digest in self and face != self.face(face.digest)}
        for shard in self._shards:
            if any(face.digest in changed for face in shard.faces):
                shard.faces = [changed.get(face.digest, face) for face in shard.faces]
                self._write_names(shard)
        self._take(self._shards)
        return len(changed)

    def remove(self, digests: Iterable[str]) -> int:
        """Takes pictures out; returns how many."""
        gone = {digest for digest in digests if digest in self}
        shards = []
        for shard in self._shards:
            kept = [i for i, row in enumerate(shard.rows) if shard.faces[row].digest not in gone]
            if len(kept) == len(shard.faces):
                shards.append(shard)
                continue
            if kept:
                faces = [shard.faces[shard.rows[i]] for i in kept]
                shards.append(self._write(_number(shard), faces, self._vectors(shard)[kept]))
            self._delete(shard)
        self._take(shards)
        return len(gone)

    def chunks(self) -> Iterator[np.ndarray]:
        """Unit embeddings float32 in portions, in the order of `faces`."""
        for start in range(0, len(self._shards), CHUNK_SHARDS):
            stored = np.concatenate([self._vectors(shard) for shard in self._shards[start : start + CHUNK_SHARDS]])
            yield from_bytes(stored) if stored.dtype == np.int8 else stored

    def embeddings(self) -> np.ndarray:
        """All embeddings (N, dim) float32."""
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
        by_faiss = len(self) > faiss_beyond
        portions = [queries[i : i + 256] for i in range(0, len(queries), 256)] or [queries]
        found = [nearest(portion, self.chunks(), k, by_faiss=by_faiss) for portion in portions]
        return np.concatenate([d for d, _ in found]), np.concatenate([p for _, p in found])

    def _take(self, shards: list[_Shard]) -> None:
        """Makes these the shards; a row that an earlier one has already is passed over."""
        self._shards, self._place, self.faces = shards, {}, []  # type: list[_Shard], dict[str, int], list[Face]
        for shard in shards:
            shard.rows = []
            for row, face in enumerate(shard.faces):
                if face.digest not in self._place:
                    self._place[face.digest] = len(self.faces)
                    self.faces.append(face)
                    shard.rows.append(row)

    def _follow(self) -> None:
        """Takes in what other processes have added since."""
        on_disk = sorted(path.stem for path in self.folder.glob("shard-*.json"))
        if on_disk != sorted(shard.name for shard in self._shards):
            self.reload()

    def _append(self, faces: list[Face], stored: np.ndarray) -> None:
        """Faces that are new, at most as many as a shard holds."""
        last = self._shards[-1] if self._shards else None
        if last is not None and len(last.rows) + len(faces) <= SHARD_ROWS:
            whole = [*(last.faces[row] for row in last.rows), *faces]
            self._shards[-1] = self._write(_number(last), whole, np.concatenate([self._vectors(last), stored]))
            self._delete(last)
        else:
            self._shards.append(self._write(0 if last is None else _number(last) + 1, faces, stored))
        for face in faces:
            self._place[face.digest] = len(self.faces)
            self.faces.append(face)

    def _delete(self, shard: _Shard) -> None:
        """Last of all: killed before, old and new shard are both there, and are read as one."""
        (self.folder / f"{shard.name}.json").unlink(missing_ok=True)
        (self.folder / f"{shard.name}.safetensors").unlink(missing_ok=True)

    def _write(self, number: int, faces: list[Face], stored: np.ndarray) -> _Shard:
        """The name comes from the contents, so that two processes never write different shards of one name."""
        contents = hashlib.sha256("".join(face.digest for face in faces).encode()).hexdigest()
        shard = _Shard(f"shard-{number:06d}-{contents[:12]}", faces, list(range(len(faces))), stored)
        tensors = {"embeddings": np.ascontiguousarray(stored)}
        write_file(self.folder / f"{shard.name}.safetensors", lambda temporary: save_file(tensors, temporary))
        self._write_names(shard)
        return shard

    def _write_names(self, shard: _Shard) -> None:
        lines = ",\n".join(json.dumps(face._asdict()) for face in shard.faces)
        write_text(self.folder / f"{shard.name}.json", f'{{"faces": [\n{lines}\n]}}\n')

    def _read_names(self, path: Path) -> _Shard:
        try:
            faces = [Face(**face) for face in json.loads(path.read_text(encoding="utf-8"))["faces"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from None
        return _Shard(path.stem, faces, [])

    def _vectors(self, shard: _Shard) -> np.ndarray:
        """Rows of a shard that count, as stored."""
        if shard.vectors is None:
            path = self.folder / f"{shard.name}.safetensors"
            try:
                shard.vectors = load_file(path)["embeddings"]
            except FileNotFoundError as error:
                if not path.with_suffix(".json").exists():
                    raise ValueError(f"{self.folder} was changed by another process meanwhile: try again.") from None
                raise _damaged(path, error) from None
            except (OSError, SafetensorError, KeyError) as error:
                raise _damaged(path, error) from None
            shape = (len(shard.faces), self.settings["dim"])
            if shard.vectors.shape != shape or shard.vectors.dtype != STORAGES[self.settings["storage"]]:
                raise _damaged(path, f"{shard.vectors.dtype} {shard.vectors.shape} instead of {shape}")
        return shard.vectors if len(shard.rows) == len(shard.faces) else shard.vectors[shard.rows]

    def _store(self, embeddings: np.ndarray) -> np.ndarray:
        return to_bytes(embeddings) if self.settings["storage"] == "int8" else embeddings


def _number(shard: _Shard) -> int:
    return int(shard.name.split("-")[1])


def _damaged(path: Path, reason: object) -> ValueError:
    both = path.with_suffix(".*")
    return ValueError(f"{path} is damaged ({reason}): delete {both} and run `linattn lab faces embed` again.")
