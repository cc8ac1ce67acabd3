"""Early exit over seeds: trained anew with each seed and number of threads, judged by the same bars."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linattn._files import parsing, write_json

from ..figures import Figure, over_seeds
from ..images.datasets import Part
from ..images.resnet import ResNet18
from ..images.training import scores
from .latency import latencies
from .macs import exit_costs
from .rules import words_of
from .study import Call, accuracy_of
from .sweep import all_logits, point
from .thresholds import ORDERING, choose_together, known
from .training import Bench, write_choice

TIMED = {1: 400, 128: 640}  # size of a batch -> test images that are timed
ROUNDS = 3
RESULT = "run.json"


@dataclass(frozen=True)
class Run:
    """One seed, trained with one number of threads, on the test images.

    Attributes:
        last_exit, without_exits: accuracies of the full network, as the last exit and as a network of its own (None where
            it was not trained).
        mac_ratio: times fewer MACs than the network without exits, every head counted that an image passes.
        time_1, time_128: times less processor time than the network without exits, in batches of 1 and 128; None where
            nothing was timed.
        shares: of the images that leave at each exit.
        exits: accuracy of each exit over all images.
        bound: of the accuracy lost against the last exit, by the validation images.
        seconds: of the processor, for training.
    """

    seed: int
    threads: int
    accuracy: float
    last_exit: float
    without_exits: float | None
    mac_ratio: float
    time_1: float | None
    time_128: float | None
    rule: str
    shares: tuple[float, ...]
    exits: tuple[float, ...]
    bound: float
    seconds: float

    @property
    def full(self) -> float:
        """The better of the two full networks."""
        return max(self.last_exit, self.without_exits or 0.0)

    @property
    def lost(self) -> float:
        return self.full - self.accuracy


@dataclass(frozen=True)
class Bar:
    """Something that every run must reach: at least the limit, or at most."""

    name: str
    attribute: str
    limit: float
    format: str
    least: bool = True

    def of(self, run: Run) -> float:
        return float(getattr(run, self.attribute))

    def met(self, run: Run) -> bool:
        value = self.of(run)
        return value >= self.limit - 1e-12 if self.least else value <= self.limit + 1e-12


BARS = (
    Bar("times fewer MACs", "mac_ratio", 3.0, ".2f"),
    Bar("times less time, one by one", "time_1", 2.0, ".2f"),
    Bar("times less time, batches of 128", "time_128", 2.0, ".2f"),
    Bar("accuracy", "accuracy", 0.9, ".4f"),
)
LOST = Bar("accuracy lost", "lost", 0.01, ".4f", least=False)
FULL = Bar("accuracy of the full network", "full", 0.9, ".4f")


def bars_of(runs: Sequence[Run]) -> tuple[Bar, ...]:
    """All bars, or those that need no clock if a run was not timed."""
    timed = all(run.time_1 is not None and run.time_128 is not None for run in runs)
    return tuple(bar for bar in BARS if timed or not bar.attribute.startswith("time"))


def meets_all(run: Run) -> bool:
    return all(bar.met(run) for bar in (*bars_of([run]), LOST))


def measure(
    bench: Bench, *, width: int, weights: Sequence[float], threads: int, with_static: bool, timed: bool = True
) -> Run:
    """Trains or loads the networks of a bench, chooses on validation images, and judges on test images."""
    kept = bench.folder / RESULT
    asked = {"recipe": bench.recipe(), "width": width, "weights": list(weights)}
    if kept.is_file():
        old = read_run(kept, asked)
        if (old.without_exits is not None or not with_static) and (old.time_1 is not None or not timed):
            return old
    parts = bench.parts
    before, start = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(threads)
    try:
        model = bench.exits(width, weights=weights)
        plain: nn.Module | None = bench.static(width) if with_static else None
        seconds = time.process_time() - start
        costs = exit_costs(model, parts.test.images[:1])
        ordering, testing = known(model, parts.train, ORDERING), known(model, parts.validation)
        static = None if plain is None else accuracy_of(scores(plain, parts.test.images), parts.test)
        chosen = choose_together(ordering, testing, costs)
        logits = all_logits(model, parts.test.images)
        found = point(logits, parts.test.labels, costs, chosen.rule)
    finally:
        torch.set_num_threads(before)
    if plain is None:  # times do not depend on weights
        plain = ResNet18(len(parts.classes), width=width, stem="cifar", channels=bench.channels).eval()
        plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    calls: dict[str, Call] = {"full": plain, "exits": lambda images: model.predict(images, chosen.rule)}
    ratios = _time_ratios(calls, parts.test) if timed else {}
    run = Run(
        seed=bench.config.seed,
        threads=threads,
        accuracy=found.accuracy,
        last_exit=accuracy_of(logits[-1], parts.test),
        without_exits=static,
        mac_ratio=costs.full / found.macs,
        time_1=ratios.get(1),
        time_128=ratios.get(128),
        rule=words_of(chosen.rule),
        shares=found.shares,
        exits=tuple((logits.argmax(-1) == parts.test.labels).double().mean(-1).tolist()),
        bound=chosen.bound,
        seconds=seconds,
    )
    write_choice(bench.folder, chosen.rule)
    write_json(kept, {"asked": asked, "run": asdict(run)})
    return run


def _time_ratios(calls: dict[str, Call], test: Part) -> dict[int, float]:
    """Size of a batch -> how many times less processor time "exits" takes than "full"."""
    ratios = {}
    for batch, count in TIMED.items():
        taken = latencies(calls, test.images[:count], min(batch, len(test)), rounds=ROUNDS)
        ratios[batch] = taken["full"].processor / taken["exits"].processor
    return ratios


def read_run(path: Path, asked: dict[str, Any]) -> Run:
    """A run that was kept, if it was made with the same options."""
    with parsing(path):
        kept: dict[str, Any] = json.loads(path.read_text())
        facts = kept["run"]
        lists = {name: tuple(facts[name]) for name in ("shares", "exits")}
        run = Run(**{field.name: (facts | lists)[field.name] for field in fields(Run)})
    if kept["asked"] != json.loads(json.dumps(asked)):
        raise ValueError(f"{path.parent} was made with other options: choose another --folder, or delete that one.")
    return run


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """A line for each run; ! marks what misses its bar."""
    rows = [["seed", "threads", "MACs", "batch 1", "batch 128", "accuracy", "full", "lost", "leave first", "bars"]]
    for run in runs:
        known = bars_of([run])
        cells = [
            format(bar.of(run), bar.format) + ("" if bar.met(run) else "!") if bar in known else "" for bar in BARS
        ]
        lost = f"{100 * run.lost:.2f}" + ("" if LOST.met(run) else "!")
        met = "met" if meets_all(run) else "not met"
        first = f"{100 * run.shares[0]:.0f} %"
        rows.append([str(run.seed), str(run.threads), *cells, f"{run.full:.4f}", lost, first, met])
    return rows


def summary_rows(runs: Sequence[Run]) -> list[list[str]]:
    """The mean over seeds with its 95 % interval, and the worst run, beside the bar."""
    rows = [["over seeds", "mean", "95 %", "worst run", "bar", ""]]
    for bar in (*bars_of(runs), LOST):
        own = mean_of(runs, bar)
        worst = min(map(bar.of, runs)) if bar.least else max(map(bar.of, runs))
        cells = [format(x, bar.format) for x in (own.value, own.low, own.high, worst)]
        limit = f"{'at least' if bar.least else 'at most'} {bar.limit:g}"
        met = "met by all" if all(map(bar.met, runs)) else f"met by {sum(map(bar.met, runs))} of {len(runs)}"
        rows.append([bar.name, cells[0], f"{cells[1]} to {cells[2]}", cells[3], limit, met])
    return rows


def mean_of(runs: Sequence[Run], bar: Bar) -> Figure:
    """Over seeds, by Student's t: runs of one seed are alike, so that a seed counts once, by the mean of its runs."""
    seeds = sorted({run.seed for run in runs})
    own = [[bar.of(run) for run in runs if run.seed == seed] for seed in seeds]
    return over_seeds([sum(values) / len(values) for values in own], seeds, bar.format)


def figures_of(runs: Sequence[Run]) -> dict[str, Figure]:
    """What the docs print: means with their intervals, the worst run of each, and the share of runs that meet all bars.

    Student's t knows seeds, not machines: the interval of times reaches down to the bar and as far up. That of a worst run
    goes from the bar, or the worse end of the mean's interval if that is beyond, to the best run.
    """
    seeds = tuple(sorted({run.seed for run in runs}))
    found = {}
    for bar in (*bars_of(runs), LOST, FULL):
        mean = mean_of(runs, bar)
        if bar.attribute.startswith("time"):
            low, high = min(mean.low, bar.limit), max(mean.high, 2 * mean.value - bar.limit)
            mean = replace(mean, low=low, high=high)
        found[f"seeds|{bar.name}|mean"] = mean
        values = sorted((bar.of(run) for run in runs), reverse=not bar.least)
        ends = (values[0], bar.limit, mean.low if bar.least else mean.high)
        low, high = (min(ends), values[-1]) if bar.least else (values[-1], max(ends))
        found[f"seeds|{bar.name}|worst run"] = Figure(values[0], low, high, seeds, bar.format)
    share = sum(map(meets_all, runs)) / len(runs)
    found["seeds|share of runs that meet all bars|mean"] = Figure(share, share, share, seeds, ".2f")
    return found
