"""Published figures over seeds: a mean, a median or a count, each with its 95 % interval."""

import math
from collections.abc import Sequence
from typing import Any

Facts = dict[str, Any]  # value, low, high, seeds and the format that the docs print it with


def exact(value: float, seeds: Sequence[int], format: str = ".4g") -> Facts:
    """A figure that no seed changes."""
    return _facts(value, value, value, seeds, format)


def mean(values: Sequence[float], seeds: Sequence[int], format: str = ".4g") -> Facts:
    """The mean over runs, with Student's t interval; every run is one value."""
    import numpy as np
    from scipy.stats import t as student

    if len(values) < 2:
        raise ValueError(f"an interval needs two runs or more, got {len(values)}.")
    middle = float(np.mean(values))
    reach = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return _facts(middle, middle - reach, middle + reach, seeds, format)


def median(values: Sequence[float], seeds: Sequence[int], format: str = ".2g") -> Facts:
    """The median over runs; its interval goes from one order statistic to another, whatever the distribution."""
    import numpy as np
    from scipy.stats import binom

    ordered = sorted(values)
    outside = int(max(0, binom.ppf(0.025, len(ordered), 0.5) - 1))  # values left out at either end
    return _facts(float(np.median(ordered)), ordered[outside], ordered[-1 - outside], seeds, format)


def count(reached: Sequence[bool], seeds: Sequence[int]) -> Facts:
    """How many runs reached something; the interval is Clopper and Pearson's, for as many runs."""
    from scipy.stats import binomtest

    runs, found = len(reached), sum(reached)
    interval = binomtest(found, runs).proportion_ci()
    return _facts(float(found), runs * float(interval.low), runs * float(interval.high), seeds, ".2g")


def _facts(value: float, low: float, high: float, seeds: Sequence[int], format: str) -> Facts:
    return {
        "value": float(value),
        "low": float(low),
        "high": float(high),
        "seeds": sorted(set(seeds)),
        "format": format,
    }
