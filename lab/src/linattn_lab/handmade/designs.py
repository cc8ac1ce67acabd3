"""Tasks that one head can solve exactly: their selectors, values and expected outputs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .numpy_head import Array, Weights
from .selectors import Selector, aggregate, by_content, by_mirror, by_position

LETTERS = ("A", "B", "C")
CLS = "#"


@dataclass(frozen=True)
class Design:
    """A task, the selector and values that solve it, and its definition.

    Attributes:
        max_len: of sequences of letters; `prefix` comes before them.
        output: what one row of the output means, for images: its columns.
        target: the rows that the output must have, from the sequence with its prefix.
    """

    name: str
    summary: str
    max_len: int
    selector: Selector
    values: dict[str, tuple[float, ...]]
    output: tuple[str, ...]
    target: Callable[[Sequence[str]], Sequence[tuple[float, ...]]]
    prefix: tuple[str, ...] = ()
    example: str = "ABBC"

    def weights(self) -> Weights:
        """By hand: the selector and the values, and nothing learned."""
        return aggregate(self.selector, self.values)

    def sequences(self) -> Iterator[tuple[str, ...]]:
        """Every sequence of the letters up to max_len, with the prefix."""
        for n in range(1, self.max_len + 1):
            for letters in itertools.product(LETTERS, repeat=n):
                yield self.prefix + letters

    def read(self, text: str) -> tuple[str, ...]:
        """A sequence as a user types it, e.g. "ABBC"."""
        letters = tuple(text.strip().upper())
        strange = sorted(set(letters) - set(LETTERS))
        if strange:
            raise ValueError(f"a sequence is made of {', '.join(LETTERS)}; {text!r} also has {', '.join(strange)}.")
        if not 1 <= len(letters) <= self.max_len:
            raise ValueError(f"{self.name} takes 1 to {self.max_len} letters, {text!r} has {len(letters)}.")
        return self.prefix + letters

    def encode(self, sequence: Sequence[str]) -> Array:
        """(n, d_in), one-hot."""
        return np.eye(len(self.selector.alphabet))[[self.selector.alphabet.index(token) for token in sequence]]

    def expected(self, sequence: Sequence[str]) -> Array:
        """(n, d_v)."""
        return np.array(self.target(sequence), dtype=float)


ONE_HOT: dict[str, tuple[float, ...]] = {"A": (1, 0, 0), "B": (0, 1, 0), "C": (0, 0, 1)}
WITH_CLS = (CLS, *LETTERS)


def _one_hot(tokens: Sequence[str]) -> list[tuple[float, ...]]:
    return [ONE_HOT[token] for token in tokens]


def _identity() -> Design:
    return Design(
        "identity",
        "select by contents: every token finds its like and returns it",
        max_len=6,
        selector=by_content(LETTERS, lambda query, key: query == key),
        values=ONE_HOT,
        output=LETTERS,
        target=_one_hot,
        example="ABBCC",
    )


def _first() -> Design:
    return Design(
        "first",
        "select by position: every token returns the first",
        max_len=4,
        selector=by_position(LETTERS, 4, lambda query, key: key == 0),
        values=ONE_HOT,
        output=LETTERS,
        target=lambda sequence: _one_hot([sequence[0]] * len(sequence)),
        example="BCAA",
    )


def _unique() -> Design:
    """Its like is worth 2, CLS is worth 1, and the token's own place takes 2 away: so CLS wins only if it is alone."""
    alike = by_content(WITH_CLS, lambda query, key: query == key != CLS)
    fallback = by_content(WITH_CLS, lambda query, key: key == CLS)
    itself = by_position(WITH_CLS, 5, lambda query, key: query == key > 0)
    return Design(
        "unique",
        "select by contents and position: +1 where a token occurs once, -1 where it has a double",
        max_len=4,
        selector=2 * alike + fallback + -2 * itself,
        values={CLS: (1,), "A": (-1,), "B": (-1,), "C": (-1,)},
        output=("once?",),
        target=lambda sequence: [(1.0 if sequence.count(token) == 1 else -1.0,) for token in sequence],
        prefix=(CLS,),
        example="ABBC",
    )


def _reverse() -> Design:
    return Design(
        "reverse",
        "select by position from the end: the sequence backwards",
        max_len=6,
        selector=by_mirror(LETTERS, 6, lambda query, key_from_end: query == key_from_end),
        values=ONE_HOT,
        output=LETTERS,
        target=lambda sequence: _one_hot(sequence[::-1]),
        example="ABBCC",
    )


def _previous() -> Design:
    return Design(
        "previous",
        "select by position: every token returns the one before it, the first returns itself",
        max_len=6,
        selector=by_position(LETTERS, 6, lambda query, key: key == max(query - 1, 0)),
        values=ONE_HOT,
        output=LETTERS,
        target=lambda sequence: _one_hot([sequence[0], *sequence[:-1]]),
        example="ABBCC",
    )


def _histogram() -> Design:
    """n likes share the attention with CLS, which alone has the value 1: the output is 1 / (1 + n)."""
    return Design(
        "histogram",
        "count by contents: 1 / (1 + how often the token occurs), from the attention left for CLS",
        max_len=6,
        selector=by_content(WITH_CLS, lambda query, key: key in (query, CLS)),
        values={CLS: (1,), "A": (0,), "B": (0,), "C": (0,)},
        output=("1/(1+n)",),
        target=lambda sequence: [(1.0,)] + [(1 / (1 + sequence.count(token)),) for token in sequence[1:]],
        prefix=(CLS,),
        example="ABBCC",
    )


DESIGNS: dict[str, Design] = {
    design.name: design for design in (_identity(), _first(), _unique(), _reverse(), _previous(), _histogram())
}
