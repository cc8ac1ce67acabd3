"""Latency of several classifiers on the same images, interleaved so that all see the same machine load."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..threads import one_thread


@dataclass(frozen=True)
class Latency:
    """Seconds per image: of the processor, and by the clock on the wall.

    On a free core they are the same. Where other programs run, the clock counts them too, and longer calls are interrupted
    more often, so ratios are taken of the processor's time.
    """

    processor: float
    wall: float


@torch.no_grad()
def latencies(
    calls: Mapping[str, Callable[[Tensor], object]], images: Tensor, batch: int, *, rounds: int = 5
) -> dict[str, Latency]:
    """What each call takes, on one thread.

    Every batch goes through all calls in turn, `rounds` times over, in an order that reverses from round to round. A
    batch's time is the median of its rounds; images take different exits, so batches are then added up.
    """
    if len(images) < batch:
        raise ValueError(f"{len(images)} pictures do not fill a batch of {batch}.")
    batches = images[: len(images) // batch * batch].split(batch)
    names = list(calls)
    totals = {name: [0.0, 0.0] for name in names}
    with one_thread():
        for name in names:
            calls[name](batches[0])
        for part in batches:
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for number in range(rounds):
                for name in names[:: 1 if number % 2 == 0 else -1]:
                    start = time.process_time(), time.perf_counter()
                    calls[name](part)
                    taken[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
            for name in names:
                for clock, times in enumerate(zip(*taken[name], strict=True)):
                    totals[name][clock] += statistics.median(times)
    count = len(batches) * batch
    return {name: Latency(processor / count, wall / count) for name, (processor, wall) in totals.items()}
