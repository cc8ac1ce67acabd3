"""Rolling back recurrent states: copies every few tokens."""

from collections import deque
from typing import Generic, TypeVar

from .base import State

S = TypeVar("S", bound=State)


class Snapshots(Generic[S]):
    """The last `keep` copies of a state, at least `every` tokens apart, for speculative decoding.

    >>> import torch, linattn
    >>> from linattn.states import Snapshots
    >>> snapshots, state, x = Snapshots(every=4), None, torch.randn(1, 1, 10, 8)
    >>> for t in range(10):
    ...     one = x[:, :, t : t + 1]
    ...     _, state = linattn.delta_rule(one, one, one, beta=one[..., 0].sigmoid(), state=state, return_state=True)
    ...     snapshots.record(state, t + 1)
    >>> state, first = snapshots.roll_back(7)  # the state after 5 tokens: tokens 5 and 6 are to be replayed
    >>> first
    5
    """

    def __init__(self, every: int = 16, keep: int = 4):
        if every < 1 or keep < 1:
            raise ValueError(f"every and keep must be at least 1, got {every} and {keep}.")
        self.every = every
        self._kept: deque[tuple[int, S]] = deque(maxlen=keep)

    def record(self, state: S, position: int) -> None:
        """Records the state after `position` tokens, if the last copy is at least `every` tokens old."""
        if self._kept and position < self._kept[-1][0]:
            raise ValueError(
                f"position {position} is before the last copy, at {self._kept[-1][0]}: call roll_back({position}) first."
            )
        if not self._kept or position >= self._kept[-1][0] + self.every:
            self._kept.append((position, state.clone()))

    def roll_back(self, position: int) -> tuple[S, int]:
        """The latest copy at or before `position`, and the first token to replay: tokens first..position - 1.

        Later copies are dropped. The returned state is a copy, so the same position can be rolled back to again.
        """
        if not self._kept or self._kept[0][0] > position:
            oldest = f"the oldest is after {self._kept[0][0]} tokens" if self._kept else "there is none"
            raise ValueError(f"no copy at or before {position} tokens: {oldest}. Keep more of them.")
        while self._kept[-1][0] > position:
            self._kept.pop()
        first, state = self._kept[-1]
        return state.clone(), first

    @property
    def positions(self) -> list[int]:
        """Token counts of the copies, in order."""
        return [position for position, _ in self._kept]

    @property
    def nbytes(self) -> int:
        """Size of all copies in bytes."""
        return sum(state.nbytes for _, state in self._kept)
