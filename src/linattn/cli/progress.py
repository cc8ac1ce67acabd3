"""A progress bar for long work, on standard error, when somebody is watching."""

import sys
import time
from collections.abc import Iterator, Sequence


def progress(labels: Sequence[str]) -> Iterator[str]:
    """Yields the labels one by one and shows how far they are and how long the rest will take."""
    start, shown = time.monotonic(), sys.stderr.isatty()
    for done, label in enumerate(labels):
        if shown:
            spent = time.monotonic() - start
            left = f", {spent / done * (len(labels) - done):.0f} s left" if done else ""
            bar = ("#" * (24 * done // len(labels))).ljust(24)
            print(f"\r[{bar}] {done}/{len(labels)} {label}{left}\033[K", end="", file=sys.stderr, flush=True)
        yield label
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
