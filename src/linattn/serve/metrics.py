"""Counters of the server, in Prometheus's format and for its page."""

import os
import threading
import time
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

WINDOW = 10.0  # seconds over which rates are averaged
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """Counts what the engine does. Rates are over the last seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"namespace": "linattn", "registry": self.registry}
        self._requests = Counter("requests", "HTTP requests", ["path", "status"], **own)
        self._read = Counter("prompt_tokens_read", "prompt tokens that went through the model", **own)
        self._prompt = Counter("prompt_tokens", "prompt tokens of started answers", **own)
        self._cached = Counter("prompt_tokens_cached", "prompt tokens that came from a stored state", **own)
        self._written = Counter("completion_tokens", "tokens written", **own)
        self._cancelled = Counter("cancelled", "requests whose client went away", **own)
        self._first = Histogram(
            "time_to_first_token_seconds", "from arrival to the first token", buckets=SECONDS, **own
        )
        self._step = Histogram("decode_step_seconds", "one token of all answers", buckets=SECONDS, **own)
        self._waiting = Gauge("requests_waiting", "requests that have not started", **own)
        self._reading = Gauge("requests_reading", "requests whose prompt is being read", **own)
        self._running = Gauge("answers_running", "answers that are being written", **own)
        self._state_bytes = Gauge("state_memory_bytes", "stored states in memory", **own)
        self._states = Gauge("states_stored", "stored prefixes and saved states, in memory and in files", **own)
        self._resident = Gauge("resident_memory_bytes", "memory of the process", **own)
        self._now = {"waiting": 0, "reading": 0, "running": 0}
        self._recent: deque[tuple[float, int, int]] = deque()  # time, tokens read, tokens written
        self._lock = threading.Lock()

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def read(self, tokens: int) -> None:
        self._read.inc(tokens)
        self._note(tokens, 0)

    def prompt(self, tokens: int, cached: int) -> None:
        self._prompt.inc(tokens)
        self._cached.inc(cached)

    def step(self, tokens: int, seconds: float) -> None:
        self._written.inc(tokens)
        self._step.observe(seconds)
        self._note(0, tokens)

    def first_token(self, seconds: float) -> None:
        self._written.inc()
        self._first.observe(seconds)
        self._note(0, 1)

    def cancelled(self) -> None:
        self._cancelled.inc()

    def load(self, waiting: int, reading: int, running: int) -> None:
        for gauge, value in ((self._waiting, waiting), (self._reading, reading), (self._running, running)):
            gauge.set(value)
        self._now = {"waiting": waiting, "reading": reading, "running": running}

    def states(self, count: int, nbytes: int) -> None:
        self._states.set(count)
        self._state_bytes.set(nbytes)

    def text(self) -> bytes:
        """For Prometheus."""
        self._resident.set(resident_bytes() or 0)
        return generate_latest(self.registry)

    def summary(self) -> dict[str, float | None]:
        """For the page."""
        with self._lock:
            self._drop_old(time.monotonic())
            read, written = (sum(row[i] for row in self._recent) for i in (1, 2))
            seconds = max(1.0, time.monotonic() - self._recent[0][0]) if self._recent else WINDOW
        rates = {"read_per_second": read / seconds, "written_per_second": written / seconds}
        return {**self._now, **rates, "resident_bytes": resident_bytes()}

    def _note(self, read: int, written: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._recent.append((now, read, written))
            self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()


def resident_bytes() -> int | None:
    """Memory of this process; None where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
