"""Caches of prompts and their prefixes: in memory up to a budget, least recently used ones spilled to files or dropped.

A prefix is found by a hash of its tokens, so a lookup costs one pass over the prompt. Methods may be called from any thread.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from transformers.cache_utils import Cache

from . import thinning
from .caches import share_buffers, storages

Load = Callable[["Entry"], Cache]
Spill = Callable[["Entry"], bool]


def digest(tokens: Sequence[int]) -> bytes:
    """16 bytes that stand for a sequence of tokens."""
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16).digest()


@dataclass(eq=False)
class Entry:
    """The cache after a prefix.

    Attributes:
        key: digest of its tokens.
        length: how many they are.
        cache: None if it is only in a file.
        file: where it is saved, if it is.
        chain: number of the sequence it was made by, if any; anchors of one chain are thinned together.
        anchor: made every k tokens, so that it may be thinned; turn boundaries are not.
        keep: never dropped: a saved state.
        logits: after the last token, for a prompt that is this prefix and nothing more; None where there are none.
        whole_only: only for such a prompt.
    """

    key: bytes
    length: int
    cache: Cache | None = None
    file: Path | None = None
    chain: int | None = None
    anchor: bool = False
    keep: bool = False
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logits: Tensor | None = None
    whole_only: bool = False

    def serves(self, length: int) -> bool:
        """True if a prompt of so many tokens, which begins with these, can start from here."""
        return self.logits is not None if self.length == length else not self.whole_only


class PrefixStore:
    """Entries by digest, in the order of their last use.

    Args:
        budget: bytes that the caches may hold in memory.
        every: tokens between anchors.
        load: reads the cache of a spilled entry; ValueError or OSError if that fails.
        spill: takes the cache of an entry that must leave memory, to write it to a file; False if it cannot.
    """

    def __init__(self, budget: int, every: int, load: Load | None = None, spill: Spill | None = None):
        self.budget, self.every, self._load, self._spill = budget, every, load, spill
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._lengths: dict[int, int] = defaultdict(int)  # length -> entries of it
        self._storages: dict[int, tuple[int, int]] = {}  # address -> bytes, entries that hold it
        self._lock = threading.RLock()
        self.memory = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int], *, longer_than: int = 0, files: bool = True) -> Entry | None:
        """The longest stored prefix that the prompt can start from, with its cache in memory; None if there is none.

        files: also look at entries that are only in a file, and read it.
        """
        while True:
            with self._lock:
                entry = self._longest(tokens, longer_than, files)
                if entry is None:
                    return None
                self._entries.move_to_end(entry.key)
                if entry.cache is not None:
                    return entry
            if self.bring_back(entry):
                return entry

    def _longest(self, tokens: Sequence[int], longer_than: int, files: bool) -> Entry | None:
        lengths = sorted(n for n in self._lengths if longer_than < n <= len(tokens))
        data, running, at, best = array("i", tokens), hashlib.blake2b(digest_size=16), 0, None
        for n in lengths:
            running.update(data[at:n].tobytes())
            at = n
            entry = self._entries.get(running.copy().digest())
            if entry is not None and entry.serves(len(tokens)) and (files or entry.cache is not None):
                best = entry
        return best

    def bring_back(self, entry: Entry) -> bool:
        """Reads a spilled entry into memory; False, and the entry is gone, if its file cannot be used."""
        if entry.cache is not None:
            return True
        try:
            if self._load is None:
                raise ValueError("there are no files.")
            cache = self._load(entry)
        except (ValueError, OSError):
            with self._lock:
                self._forget(entry)
            return False
        with self._lock:
            if entry.cache is None:
                entry.cache = cache
                self._hold(cache)
            self._shrink(spare=entry)
        return True

    def put(
        self,
        tokens: Sequence[int],
        cache: Cache,
        *,
        chain: int | None,
        anchor: bool = False,
        keep: bool = False,
        logits: Tensor | None = None,
        whole_only: bool = False,
    ) -> Entry:
        """Stores the cache after `tokens`, which must not be changed any more. The options are those of Entry."""
        with self._lock:
            key = digest(tokens)
            entry = self._entries.get(key)
            if entry is None:
                entry = Entry(key, len(tokens), chain=chain, anchor=anchor, tokens=array("i", tokens))
                entry.whole_only = whole_only
                self._entries[key] = entry
                self._lengths[entry.length] += 1
            if entry.cache is not None and entry.whole_only and not whole_only:
                self._let_go(entry.cache)
                entry.cache = None
            if entry.cache is None:
                entry.cache = cache
                self._hold(cache)
            entry.anchor, entry.keep = entry.anchor and anchor, entry.keep or keep
            entry.logits = entry.logits if logits is None else logits
            entry.whole_only = entry.whole_only and whole_only
            self._entries.move_to_end(key)
            if chain is not None:
                self._share(entry, chain)
                self._thin(chain)
            self._shrink(spare=entry)
            return entry

    def adopt(self, entry: Entry, chain: int) -> None:
        """Another sequence continues from an entry. If nothing longer of its own sequence is stored, that one goes on in it.

        A conversation of many requests is one chain this way, and only its end is worth keeping for long.
        """
        with self._lock:
            own = [e for e in self._entries.values() if e.chain is not None and e.chain == entry.chain]
            if own and max(e.length for e in own) == entry.length:
                for other in own:
                    other.chain = chain

    def register(self, key: bytes, length: int, file: Path, *, keep: bool) -> Entry:
        """Makes a file of an earlier run known."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key, length)
                self._lengths[length] += 1
            entry.file, entry.keep = file, entry.keep or keep
            return entry

    def release(self, key: bytes) -> None:
        """A saved state was deleted: its entry may be dropped from now on, and has no file any more."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.keep, entry.file = False, None
                if entry.cache is None:
                    self._forget(entry)

    def set_file(self, entry: Entry, file: Path | None) -> None:
        """The entry is in a file now, or could not be written."""
        with self._lock:
            entry.file = file

    def get(self, key: bytes) -> Entry | None:
        with self._lock:
            return self._entries.get(key)

    def spilled(self) -> list[Entry]:
        """Entries that have left memory for a file and are not saved states, oldest first."""
        with self._lock:
            return [e for e in self._entries.values() if e.cache is None and e.file is not None and not e.keep]

    def forget(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._forget(entry)

    # Memory -----------------------------------------------------------------------------------------------------------

    def _hold(self, cache: Cache) -> None:
        for address, size in storages(cache).items():
            held = self._storages.get(address, (size, 0))[1]
            self._storages[address] = size, held + 1
            self.memory += 0 if held else size

    def _let_go(self, cache: Cache) -> None:
        for address in storages(cache):
            size, held = self._storages.get(address, (0, 0))
            if held <= 1:
                self._storages.pop(address, None)
                self.memory -= size
            else:
                self._storages[address] = size, held - 1

    def _share(self, longest: Entry, chain: int) -> None:
        """Entries of the same chain with keys and values use the buffers of the longest one."""
        for entry in self._entries.values():
            if entry.chain == chain and entry.length < longest.length and entry.cache is not None:
                assert longest.cache is not None
                self._let_go(entry.cache)
                share_buffers(entry.cache, longest.cache)
                self._hold(entry.cache)

    def _thin(self, chain: int) -> None:
        anchors = [e for e in self._entries.values() if e.chain == chain and e.anchor and not e.keep]
        kept = thinning.keep([e.length for e in anchors], self.every)
        for entry in anchors:
            if entry.length not in kept:
                self._forget(entry)

    def _shrink(self, spare: Entry) -> None:
        """Spills or drops entries until the budget holds: anchors first, then others that a longer one of their sequence
        replaces, then the ends of sequences; of each kind the least recently used one first.
        """
        if self.memory <= self.budget:
            return
        ends: dict[int | None, int] = {}
        for entry in self._entries.values():
            ends[entry.chain] = max(entry.length, ends.get(entry.chain, 0))

        def value(entry: Entry) -> int:
            return 0 if entry.anchor else 1 if entry.chain is not None and entry.length < ends[entry.chain] else 2

        for entry in sorted(self._entries.values(), key=value):
            if self.memory <= self.budget:
                return
            if entry is spare or entry.cache is None or (entry.keep and entry.file is None):
                continue
            if entry.file is None and not (self._spill is not None and self._spill(entry)):
                self._forget(entry)
                continue
            cache, entry.cache = entry.cache, None
            self._let_go(cache)

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        self._lengths[entry.length] -= 1
        if not self._lengths[entry.length]:
            del self._lengths[entry.length]
        if entry.cache is not None:
            self._let_go(entry.cache)
            entry.cache = None
