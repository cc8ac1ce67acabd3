"""Timing side by side: candidates take turns of equal length, so that a busy moment of the machine hits all alike.

A call that takes seconds is hit by every disturbance, while the best of a thousand short calls is hit by none. So all
candidates get turns as long as the slowest call: short calls are repeated within a turn, and their mean counts.
"""

import time
from collections.abc import Callable

import torch

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


def matmul_rate(calls: dict[str, Call], budget: float) -> tuple[dict[str, float], float]:
    """Seconds of each call, and FLOP/s of torch's own 2048^3 matrix product that took turns with them: the roof."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = seconds({"matmul": lambda: a @ b, **calls}, budget=budget)
    return best, 2 * 2048**3 / best.pop("matmul")
