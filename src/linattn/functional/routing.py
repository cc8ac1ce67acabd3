"""Where the public functions send a call while a context such as linattn.parallel.sequence_parallel is open.

Layers above this one register a router; this module knows nothing of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor


class Router(Protocol):
    """Serves calls of the public functions in their place."""

    def function(self, name: str) -> Callable[..., Any]:
        """The function that serves calls of linattn.<name>, with the same arguments."""
        ...

    def tokens_before(self, counts: Tensor) -> Tensor:
        """Of counts (B,) of this process's tokens: how many the processes before it hold."""
        ...

    def start_of(self, tokens: int) -> tuple[int, bool]:
        """Where this process's tokens start in the sequence, and whether any process has none."""
        ...

    def next_labels(self, labels: Tensor, ignore_index: int) -> Tensor:
        """labels (B, T) moved by one token, across the borders of shards."""
        ...

    def mean_loss(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean over all processes of a sum of losses of this process over `count` tokens."""
        ...


_current: ContextVar[Router | None] = ContextVar("linattn_router", default=None)
open_contexts = (
    0  # in any thread; without one, a call does not look at the ContextVar, which torch.compile cannot trace
)


def current() -> Router | None:
    """The router of this context, or None."""
    return _current.get() if open_contexts else None


@contextmanager
def routed(router: Router | None) -> Iterator[None]:
    """Sends the calls of this thread to a router; None: to this process alone, as without a context."""
    global open_contexts
    token = _current.set(router)
    open_contexts += 1
    try:
        yield
    finally:
        open_contexts -= 1
        _current.reset(token)
