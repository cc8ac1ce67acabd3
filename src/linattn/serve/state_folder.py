"""The folder of --state-dir: saved states, which are kept, and spilled prefixes, which are dropped when there are too many.

File names are made here, from random or hexadecimal digits; nothing that a client sends becomes part of a path.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.cache_utils import Cache

from . import snapshots
from .prefix_store import Entry
from .snapshots import Snapshot

logger = logging.getLogger("linattn.serve")
LEFT_OVER = 3600.0  # seconds after which no process still writes a file
MOST_PENDING = 4  # caches that wait to be written; more are dropped instead


class StateFolder:
    """Files of snapshots under one folder, and the thread that writes spilled prefixes.

    Args:
        budget: bytes of spilled prefixes.

    Attributes:
        on_written: called with an entry and the file that its cache was written to, or None if that failed.
    """

    def __init__(self, folder: Path, fingerprint: str, new_cache: Callable[[], Cache], budget: int):
        self.saved, self.spilled = folder / "saved", folder / "prefixes"
        self.fingerprint, self._new_cache, self.budget = fingerprint, new_cache, budget
        for path in (self.saved, self.spilled):
            path.mkdir(parents=True, exist_ok=True)
            for found in path.glob(".linattn-*"):  # another server of this folder may be writing one of them
                if time.time() - _age(found) > LEFT_OVER:  # its process was killed
                    found.unlink(missing_ok=True)
        self._pending: dict[bytes, Cache] = {}
        self._queue: queue.Queue[Entry | None] = queue.Queue()
        self._lock = threading.Lock()
        self.on_written: Callable[[Entry, Path | None], None] = lambda *_: None
        self._thread = threading.Thread(target=self._write_all, name="linattn-spill", daemon=True)
        self._thread.start()

    # Saved states -----------------------------------------------------------------------------------------------------

    def save(self, name: str, snapshot: Snapshot) -> Path:
        """Writes a saved state; it is on the disk when this returns."""
        path = self.saved / f"{name}.safetensors"
        snapshots.save(path, snapshot, self.fingerprint)
        return path

    def saved_files(self) -> Iterator[tuple[str, Path, dict[str, str], dict[str, Any]]]:
        """Name, path, header and `about` of every saved state, those of other models too; damaged files are skipped."""
        for path in sorted(self.saved.glob("*.safetensors")):
            try:
                header, about = snapshots.read_about(path)
            except (ValueError, OSError) as error:
                logger.warning("skipped a saved state: %s", error)
                continue
            yield path.stem, path, header, about

    def read(self, path: Path) -> Snapshot:
        """ValueError if the file is damaged or of another model, OSError if it cannot be read."""
        return snapshots.load(path, self._new_cache(), self.fingerprint)

    # Spilled prefixes -------------------------------------------------------------------------------------------------

    def spilled_files(self) -> Iterator[tuple[bytes, int, Path]]:
        """Digest, tokens and path of the spilled prefixes of this model, oldest first."""
        found = sorted(self.spilled.glob("*.safetensors"), key=_age)
        for path in found:
            try:
                header, _ = snapshots.read_about(path)
                if header.get("fingerprint") == self.fingerprint:
                    yield bytes.fromhex(path.stem), int(header["tokens"]), path
            except (ValueError, OSError, KeyError):
                path.unlink(missing_ok=True)

    def spill(self, entry: Entry) -> bool:
        """Takes the cache of an entry to write it; False if too many are waiting already."""
        if entry.cache is None or len(entry.tokens) != entry.length:  # its tokens are in a file that was deleted
            return False
        with self._lock:
            if len(self._pending) >= MOST_PENDING:
                return False
            self._pending[entry.key] = entry.cache
        self._queue.put(entry)
        return True

    def load(self, entry: Entry) -> Cache:
        """The cache of an entry that has left memory."""
        with self._lock:
            if entry.key in self._pending:
                return self._pending[entry.key]
        if entry.file is None:
            raise ValueError("this prefix was not written.")
        if entry.file.parent == self.spilled:
            os.utime(entry.file)
        return self.read(entry.file).cache

    def close(self) -> None:
        """Waits until everything is written."""
        self._queue.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            path: Path | None = self.spilled / f"{entry.key.hex()}.safetensors"
            assert path is not None
            try:
                snapshots.save(path, Snapshot(list(entry.tokens), self._pending[entry.key]), self.fingerprint)
                self._prune()
            except OSError as error:  # a full disk must not stop the server
                logger.warning("could not write a prefix: %s", error)
                path = None
            self.on_written(entry, path)
            with self._lock:
                del self._pending[entry.key]

    def _prune(self) -> None:
        """Deletes the spilled prefixes that were not used for the longest time, down to the budget."""
        found = sorted(self.spilled.glob("*.safetensors"), key=_age, reverse=True)
        total = 0
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
            if total > self.budget:
                path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    """When it was written or used last."""
    with contextlib.suppress(FileNotFoundError):  # another server has deleted it
        return path.stat().st_mtime
    return time.time()
