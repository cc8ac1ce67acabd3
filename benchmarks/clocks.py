"""Timing side by side: candidates take turns of equal length, so that a busy moment of the machine hits all alike.

A call that takes seconds lives through every disturbance; of a thousand calls that take milliseconds the best one lives
through none. So the unit is a turn, as long as the slowest call takes: short calls are repeated, and their mean counts.
"""

import time
from collections.abc import Callable

Call = Callable[[], object]


def seconds(
    calls: dict[str, Call], *, budget: float = 6.0, least: int = 3, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of each call in its best turn, within about `budget` seconds for all; everyone has at least `least` turns."""
    best = {name: float("inf") for name in calls}
    turn = 0.0
    for call in calls.values():
        call()
        begun = clock()
        call()
        turn = max(turn, clock() - begun)
    start, rounds = time.perf_counter(), 0
    while rounds < least or time.perf_counter() - start < budget:
        for name, call in calls.items():
            runs, begun, spent = 0, clock(), 0.0
            while spent < turn * 0.9:
                call()
                runs, spent = runs + 1, clock() - begun
            best[name] = min(best[name], spent / runs)
        rounds += 1
    return best
