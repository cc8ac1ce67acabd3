"""Time and peak memory of a call."""

import contextlib
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..engines import release


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the best and the median of the repeats."""

    best: float
    median: float
    repeats: int


def timing(call: Callable[[], object], *, seconds: float = 0.3, repeats: int = 3) -> Timing:
    """Calls once to warm up, then again until `seconds` have passed and at least `repeats` times (twice if slow).

    >>> from linattn.measure import timing
    >>> timing(lambda: sum(range(1000)), seconds=0.01).best > 0
    True
    """
    start = time.perf_counter()
    call()
    if time.perf_counter() - start > 4 * seconds:
        repeats = min(repeats, 2)  # two repeats are enough for a call this long
    times: list[float] = []
    while len(times) < repeats or (sum(times) < seconds and len(times) < 1000):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Timing(min(times), statistics.median(times), len(times))


def peak_memory(call: Callable[[], object]) -> int | None:
    """Peak growth of the process during one call in bytes, result included; None where it cannot be measured.

    Linux keeps a high-water mark of resident memory that a process may reset; other systems do not.
    """
    gc.collect()
    if not _reset_high_water():
        return None
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _reset_high_water() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):  # another libc: the figure is then a lower bound
        ctypes.CDLL(None).malloc_trim(0)  # memory freed earlier but kept by malloc would hide what the call takes
    release()  # so would what the native engine keeps
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")
