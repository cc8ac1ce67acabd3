"""Intervals of figures over seeds that are no means: a median, and a count of runs."""

from collections.abc import Sequence

from .figures import Figure


def median(values: Sequence[float], seeds: Sequence[int], format: str = ".2g") -> Figure:
    """The median over runs; its interval goes from one order statistic to another, whatever the distribution."""
    import numpy as np
    from scipy.stats import binom

    ordered = sorted(values)
    outside = int(max(0, binom.ppf(0.025, len(ordered), 0.5) - 1))  # values left out at either end
    return Figure(float(np.median(ordered)), ordered[outside], ordered[-1 - outside], tuple(seeds), format)


def count(reached: Sequence[bool], seeds: Sequence[int]) -> Figure:
    """How many runs reached something; the interval is Clopper and Pearson's, for as many runs."""
    from scipy.stats import binomtest

    runs, found = len(reached), sum(reached)
    interval = binomtest(found, runs).proportion_ci()
    return Figure(float(found), runs * float(interval.low), runs * float(interval.high), tuple(seeds), ".2g")
