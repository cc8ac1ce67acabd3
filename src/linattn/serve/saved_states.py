"""Explicit states: a text that was read once, under an id that later requests name."""

import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import caches
from .prefix_store import PrefixStore, digest
from .snapshots import Snapshot
from .state_folder import StateFolder

ID = re.compile(r"state-[0-9a-f]{24}")


@dataclass
class SavedState:
    """What is known of a saved state. `tokens` is None until its file is read after a restart.

    Attributes:
        usable: False for a state of another model, kernel or calibration.
    """

    id: str
    length: int
    nbytes: int
    about: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None
    file: Path | None = None
    usable: bool = True

    @property
    def key(self) -> bytes | None:
        """Of its entry in the prefix store; None if its file does not say."""
        try:
            return bytes.fromhex(self.about["digest"])
        except (KeyError, TypeError, ValueError):
            return None

    def public(self) -> dict[str, Any]:
        """As the server shows it: never the text."""
        shown = {name: self.about.get(name) for name in ("name", "kind", "created")}
        return {
            "id": self.id,
            "object": "state",
            **shown,
            "tokens": self.length,
            "bytes": self.nbytes,
            "saved": self.file is not None,
            "usable": self.usable,
        }


class SavedStates:
    """All saved states by id. Their caches are entries of the prefix store that are never dropped."""

    def __init__(self, store: PrefixStore, folder: StateFolder | None):
        self._store, self._folder, self._lock = store, folder, threading.Lock()
        self._states: dict[str, SavedState] = {}
        for name, path, header, about in folder.saved_files() if folder else []:
            if not ID.fullmatch(name):
                continue
            usable = folder is not None and header.get("fingerprint") == folder.fingerprint
            size = path.stat().st_size
            self._states[name] = SavedState(name, int(header["tokens"]), size, about, file=path, usable=usable)
            key = self._states[name].key
            if usable and key is not None:
                store.register(key, int(header["tokens"]), path, keep=True)

    def add(self, snapshot: Snapshot) -> SavedState:
        """Keeps a snapshot; with a state folder, it is on the disk when this returns."""
        name = f"state-{secrets.token_hex(12)}"
        snapshot.about |= {"digest": digest(snapshot.tokens).hex(), "created": int(time.time())}
        path = self._folder.save(name, snapshot) if self._folder else None
        entry = self._store.put(snapshot.tokens, snapshot.cache, chain=None, keep=True)
        if path is not None:
            self._store.set_file(entry, path)
        size = path.stat().st_size if path else caches.nbytes(snapshot.cache)
        state = SavedState(name, len(snapshot.tokens), size, snapshot.about, snapshot.tokens, path)
        with self._lock:
            self._states[name] = state
        return state

    def get(self, name: str) -> SavedState | None:
        """The state of an id; None if there is none."""
        with self._lock:
            return self._states.get(name)

    def tokens_of(self, state: SavedState) -> list[int]:
        """Its tokens. ValueError if its file is damaged or of another model."""
        if state.tokens is None:
            if self._folder is None or state.file is None:
                raise ValueError("this state has no file.")
            snapshot = self._folder.read(state.file)
            entry = self._store.put(snapshot.tokens, snapshot.cache, chain=None, keep=True)
            self._store.set_file(entry, state.file)
            state.tokens = snapshot.tokens
        return state.tokens

    def delete(self, name: str) -> bool:
        """False if there is no such state."""
        with self._lock:
            state = self._states.pop(name, None)
            if state is None:
                return False
            key = state.key
            others = [s for s in self._states.values() if s.key == key]
        if state.file is not None:
            state.file.unlink(missing_ok=True)
        if key is None:
            return True
        if not others:
            self._store.release(key)
        elif (entry := self._store.get(key)) is not None:
            self._store.set_file(entry, others[0].file)
        return True

    def all(self) -> list[SavedState]:
        """All states, the newest first."""
        with self._lock:
            return sorted(self._states.values(), key=_created, reverse=True)


def _created(state: SavedState) -> float:
    found = state.about.get("created")
    return found if isinstance(found, int) else 0
