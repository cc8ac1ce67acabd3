"""A small vocabulary to write attention down by hand, after RASP (Weiss et al., 2021) and tracr (Lindner et al., 2023).

A selector scores every pair of a query and a key, by what the tokens are, by where they stand, or both. Softmax turns
the best score of a row into attention: evenly among the keys that reach it. `aggregate` averages values over them.

>>> same = by_content("ABC", lambda query, key: query == key)
>>> aggregate(same, {"A": [1, 0, 0], "B": [0, 1, 0], "C": [0, 0, 1]}).Km.shape
(3, 3)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .numpy_head import Array, Weights

# The scaled score by which a selected key beats the next best. What is left for n others is n e^-GAP.
GAP = 30.0


@dataclass(frozen=True)
class Selector:
    """Scores of a key for a query, in whole units: content + position + position with the key's place from the end.

    Attributes:
        alphabet: the tokens, in the order of their one-hot vectors.
        content: (tokens, tokens) by [query, key]; None if contents do not matter.
        position: (max_len, max_len) by [query place, key place], from the start.
        mirror: (max_len, max_len) by [query place from the start, key place from the end].
    """

    alphabet: tuple[str, ...]
    content: Array | None = None
    position: Array | None = None
    mirror: Array | None = None

    def __add__(self, other: "Selector") -> "Selector":
        """Both at once: the scores add up."""
        if self.alphabet != other.alphabet:
            raise ValueError(f"selectors for {self.alphabet} and {other.alphabet} cannot be added.")
        parts = ("content", "position", "mirror")
        return Selector(self.alphabet, *(_sum(getattr(self, p), getattr(other, p)) for p in parts))

    def __mul__(self, units: float) -> "Selector":
        """Worth that many units instead of one; negative to avoid."""
        return Selector(self.alphabet, *(None if t is None else t * units for t in self._tables()))

    __rmul__ = __mul__

    def _tables(self) -> tuple[Array | None, Array | None, Array | None]:
        return self.content, self.position, self.mirror

    def scores(self, sequence: Sequence[str]) -> Array:
        """(n, n), by [query, key], in units."""
        n = len(sequence)
        total = np.zeros((n, n))
        if self.content is not None:
            index = [self.alphabet.index(token) for token in sequence]
            total += self.content[np.ix_(index, index)]
        if self.position is not None:
            total += self.position[:n, :n]
        if self.mirror is not None:
            total += self.mirror[:n, :n][:, ::-1]
        return total

    def selected(self, sequence: Sequence[str]) -> NDArray[np.bool_]:
        """(n, n) bool: the keys with the best score of each query's row."""
        scores = self.scores(sequence)
        return scores > scores.max(1, keepdims=True) - 0.5


def by_content(alphabet: Sequence[str], chosen: Callable[[str, str], bool]) -> Selector:
    """Selects keys by chosen(query token, key token)."""
    table = np.array([[float(chosen(query, key)) for key in alphabet] for query in alphabet])
    return Selector(tuple(alphabet), content=table)


def by_position(alphabet: Sequence[str], max_len: int, chosen: Callable[[int, int], bool]) -> Selector:
    """Selects keys by chosen(query place, key place), both counted from 0 at the start."""
    return Selector(tuple(alphabet), position=_places(max_len, chosen))


def by_mirror(alphabet: Sequence[str], max_len: int, chosen: Callable[[int, int], bool]) -> Selector:
    """Selects keys by chosen(query place from the start, key place from the end)."""
    return Selector(tuple(alphabet), mirror=_places(max_len, chosen))


def aggregate(selector: Selector, values: Mapping[str, Sequence[float]], gap: float = GAP) -> Weights:
    """The head that averages the values of the selected keys' tokens.

    Queries say what they are and where they stand, as one-hot vectors; keys carry the scores that they have for each
    such query. Both get half of the gap, so that neither matrix is the large one.
    """
    missing = [token for token in selector.alphabet if token not in values]
    if missing:
        raise ValueError(
            f"every token needs a value, {', '.join(missing)} {'has' if len(missing) == 1 else 'have'} none."
        )
    tokens = len(selector.alphabet)
    places = None if selector.position is None and selector.mirror is None else _max_len(selector)
    # Rows of x: token, place from the start (if any place is needed), place from the end (if mirrored).
    start = 0 if places is None else places
    end = 0 if selector.mirror is None or places is None else places
    query_parts, key_parts = [], []
    eye = np.eye(tokens + start + end)
    rows = {"token": eye[:tokens], "start": eye[tokens : tokens + start], "end": eye[tokens + start :]}
    for table, query, key in (
        (selector.content, "token", "token"),
        (selector.position, "start", "start"),
        (selector.mirror, "start", "end"),
    ):
        if table is not None:
            query_parts.append(rows[query].T)
            key_parts.append(rows[key].T @ table.T)
    Qm, Km = np.concatenate(query_parts, 1), np.concatenate(key_parts, 1)
    size = math.sqrt(gap * math.sqrt(Qm.shape[1]))
    Vm = np.zeros((len(eye), len(next(iter(values.values())))))
    Vm[:tokens] = [values[token] for token in selector.alphabet]
    return Weights(Km * size, Qm * size, Vm, np.eye(start) if start else None, np.eye(end) if end else None)


def _places(max_len: int, chosen: Callable[[int, int], bool]) -> Array:
    return np.array([[float(chosen(query, key)) for key in range(max_len)] for query in range(max_len)])


def _max_len(selector: Selector) -> int:
    sizes = {len(table) for table in (selector.position, selector.mirror) if table is not None}
    if len(sizes) != 1:
        raise ValueError(f"selectors by position must be for one max_len, got {sorted(sizes)}.")
    return sizes.pop()


def _sum(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    if a.shape != b.shape:
        raise ValueError(f"selectors by position must be for one max_len, got {len(a)} and {len(b)}.")
    return a + b
