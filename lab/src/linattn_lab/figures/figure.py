"""A figure with its interval and seeds, and the option --figures of the lab's commands."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..commandline import add_output, write_json

FORMAT = ".4g"


@dataclass(frozen=True)
class Figure:
    """A number that the docs print.

    Args:
        value: what was measured.
        low, high: where 95 of 100 runs with other people, images or seeds are expected; `low == value == high` for what
            nothing random goes into.
        seeds: of the runs behind it.
        format: how it is printed, as Python's format() takes it: ".3f", "+.2f", ".0%".
    """

    value: float
    low: float
    high: float
    seeds: tuple[int, ...] = (0,)
    format: str = FORMAT

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if not all(math.isfinite(x) for x in (self.value, self.low, self.high)):
            raise ValueError(f"a figure must be finite, got {self.value} in {self.low} to {self.high}.")
        if not self.low <= self.value <= self.high:
            raise ValueError(f"a figure lies within its interval, got {self.value} in {self.low} to {self.high}.")

    def text(self, value: float | None = None) -> str:
        """The value, or another one, as the docs print it."""
        return format(self.value if value is None else value, self.format)

    def interval(self) -> str:
        """`0.83 to 0.95`; `exact` where nothing random goes in."""
        if self.low == self.high:
            return "exact"
        return f"{self.text(self.low)} to {self.text(self.high)}"

    def moved(self, now: float) -> bool:
        """Whether a fresh run is beyond the interval, and would be printed otherwise."""
        return not (self.low <= now <= self.high or (math.isfinite(now) and self.text(now) == self.text()))

    def facts(self) -> dict[str, Any]:
        found = {"value": self.value, "low": self.low, "high": self.high, "seeds": list(self.seeds)}
        return found if self.format == FORMAT else found | {"format": self.format}


def over_seeds(values: Sequence[float], seeds: Sequence[int], format: str = FORMAT, *, share: bool = False) -> Figure:
    """The mean over seeds with its 95 % interval by Student's t. A share stays within 0 and 1."""
    import numpy as np
    from scipy.stats import t as student

    if len(values) < 2 or len(values) != len(seeds):
        raise ValueError(f"an interval over seeds needs two values or more, got {len(values)} of {len(seeds)} seeds.")
    mean = float(np.mean(values))
    reach = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    low, high = mean - reach, mean + reach
    if share:
        low, high = max(0.0, low), min(1.0, high)
    return Figure(mean, low, high, tuple(seeds), format)


def add_figures(parser: argparse.ArgumentParser) -> None:
    """Adds --figures; `save_figures` writes it."""
    add_output(
        parser, "--figures", "write what the docs print, each with interval and seeds, for `linattn lab figures`"
    )


def save_figures(args: argparse.Namespace, figures: Mapping[str, Figure]) -> None:
    """Writes the file of --figures, if one was named."""
    if args.figures:
        write_json(args.figures, {key: figure.facts() for key, figure in figures.items()})
        print(f"wrote {args.figures}")
