"""When what is done: the pieces a prompt is read in, and how time is shared between reading and writing."""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_PIECE = 32  # a turn that ends sooner after the last cut gets no cut of its own


@dataclass(frozen=True)
class Schedule:
    """Sizes and limits.

    Attributes:
        piece: tokens of a prompt that are read at once.
        every: tokens between anchors, a multiple of `piece`.
        rows: sequences that are worked on together.
        decode_share: of the time, for writing, while prompts are being read.
    """

    piece: int = 128
    every: int = 128
    rows: int = 64
    decode_share: float = 0.5


@dataclass(frozen=True)
class Cut:
    """The end of a piece.

    Attributes:
        end: the position.
        keep: store the state there.
        anchor: it is one of those every few tokens, which are thinned.
        regular: every prompt that begins like this is cut here.
    """

    end: int
    keep: bool
    anchor: bool
    regular: bool


def next_cut(position: int, length: int, boundaries: Sequence[int], schedule: Schedule) -> Cut:
    """The end of the piece that starts at `position`. It depends only on the tokens before it, or is the prompt's end."""
    grid = (position // schedule.piece + 1) * schedule.piece
    start = position // schedule.piece * schedule.piece
    turns, last = [], start
    for boundary in boundaries:  # those of this piece that are far enough from the cut before them
        if start < boundary < grid and boundary >= last + LEAST_PIECE:
            turns.append(boundary)
            last = boundary
    turn = next((boundary for boundary in turns if boundary > position), None)
    end = grid if turn is None else turn
    if end > length or (end == length and turn is None and length % schedule.piece):
        return Cut(length, keep=True, anchor=False, regular=False)
    anchor = turn is None and end % schedule.every == 0
    return Cut(end, keep=anchor or turn is not None or end == length, anchor=anchor and end != length, regular=True)


def shared_target(mine: Sequence[int], theirs: Sequence[int], every: int) -> int:
    """The last position at which a job that reads `theirs` will store a state that a prompt `mine` can start from."""
    common = min(len(mine), len(theirs))
    if mine[:common] != theirs[:common]:
        low, high = 0, common  # the first `low` tokens agree, the first `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if mine[low:middle] == theirs[low:middle] else (low, middle)
        common = low
    return common if common == len(theirs) else common // every * every


class Share:
    """Shares time between reading and writing: after a piece, writing gets its part before the next piece."""

    def __init__(self, decode_share: float):
        self._ratio = decode_share / (1 - decode_share)
        self._owed = 0.0  # seconds that writing may have before the next piece

    @property
    def may_read(self) -> bool:
        return self._owed <= 0

    def read(self, seconds: float) -> None:
        self._owed = seconds * self._ratio

    def decoded(self, seconds: float) -> None:
        self._owed -= seconds
