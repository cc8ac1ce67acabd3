"""Measured time of several ways to classify the same pictures, interleaved so that they share the machine's moods."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .._threads import one_thread


@torch.no_grad()
def latencies(
    calls: Mapping[str, Callable[[Tensor], object]], images: Tensor, batch: int, *, rounds: int = 5
) -> dict[str, float]:
    """Seconds per picture of each call, on one thread.

    Every batch goes through all calls in turn, `rounds` times over, in an order that reverses from round to round. A
    batch's time is the median of its rounds; pictures take different exits, so batches are then added up.
    """
    if len(images) < batch:
        raise ValueError(f"{len(images)} pictures do not fill a batch of {batch}.")
    batches = images[: len(images) // batch * batch].split(batch)
    names = list(calls)
    with one_thread():
        for name in names:
            calls[name](batches[0])
        totals = dict.fromkeys(names, 0.0)
        for part in batches:
            taken: dict[str, list[float]] = {name: [] for name in names}
            for number in range(rounds):
                for name in names[:: 1 if number % 2 == 0 else -1]:
                    start = time.perf_counter()
                    calls[name](part)
                    taken[name].append(time.perf_counter() - start)
            for name in names:
                totals[name] += statistics.median(taken[name])
    return {name: total / (len(batches) * batch) for name, total in totals.items()}
