"""Timing side by side: candidates take turns, so that a busy moment of the machine hits all of them, and the best counts."""

import time
from collections.abc import Callable

Call = Callable[[], object]


def seconds(
    calls: dict[str, Call], *, budget: float = 6.0, least: int = 3, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Best time of each call within about `budget` seconds for all; every one runs at least `least` times."""
    best = {name: float("inf") for name in calls}
    for call in calls.values():
        call()
    start, rounds = time.perf_counter(), 0
    while rounds < least or time.perf_counter() - start < budget:
        for name, call in calls.items():
            begun = clock()
            call()
            best[name] = min(best[name], clock() - begun)
        rounds += 1
    return best
