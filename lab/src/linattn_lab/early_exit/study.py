"""Measurements of the report; page.py and plots.py show them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..difficulty import measure
from ..images.datasets import Part
from ..images.training import scores
from .latency import Latency, latencies
from .macs import ExitCosts, course_totals, exit_costs, macs
from .rules import RULES, Rule, decide, name_of, words_of
from .sweep import Point, all_logits, choose, point, sweep
from .thresholds import ORDERING, choose_together, known
from .training import TRANSFORMER, Bench, Split
from .wrapper import EarlyExit

TIMED = {1: 200, 128: 512}  # size of a batch -> images that are timed
DEPTHS, REFERENCES = 1000, 2000  # images whose prediction depth is measured, and among which
TRANSFORMER_GIVE_UP = 0.005  # accuracy that its single tolerance may lose on the validation images
PER_RULE = 4  # tolerances of each rule that are timed
WITH_EXITS, ALL_LAYERS = "transformer, early exit", "transformer, all layers"  # what is timed of it

Call = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Static:
    """A network without exits on the test pictures."""

    width: int
    accuracy: float
    macs: int


@dataclass
class Curve:
    """A network with exits on the test pictures.

    Attributes:
        logits: (exits, n, classes).
        points: the whole sweep.
        chosen: the point whose rule and tolerance were chosen on the validation pictures.
        exits: (n,) the exit that each image takes at that point; 0 is the first.
        full_accuracy: of the last exit, without early exits.
    """

    logits: Tensor
    costs: ExitCosts
    points: list[Point]
    chosen: Point
    exits: Tensor
    full_accuracy: float

    @property
    def mac_ratio(self) -> float:
        """How many times fewer multiply-adds than the network without exits."""
        return self.costs.full / self.chosen.macs

    def exit_accuracies(self, labels: Tensor) -> list[tuple[float, float | None]]:
        """For each exit: accuracy over all images, and over those that leave there (None where none does)."""
        found = []
        for number, own in enumerate(self.logits):
            right, here = own.argmax(-1) == labels, self.exits == number
            found.append((float(right.double().mean()), float(right[here].double().mean()) if here.any() else None))
        return found


@dataclass
class Study:
    """All that was measured.

    Attributes:
        times: size of batch -> what was timed -> its seconds per picture.
        depth: of the first test images, in the network without exits.
    """

    test: Part
    classes: tuple[str, ...]
    floor: float
    curve: Curve
    statics: list[Static]
    transformer: Curve | None
    times: dict[int, dict[str, Latency]]
    depth: Tensor | None = None

    @property
    def full(self) -> Static:
        """The network of the same width without exits."""
        return max(self.statics, key=lambda static: static.width)

    def latency_ratio(self, batch: int, clock: str = "processor") -> float:
        """How many times faster than the network without exits, at the chosen point."""
        return self._faster(batch, static_name(self.full.width), point_name(self.curve.chosen), clock)

    def transformer_latency_ratio(self, batch: int) -> float:
        """How many times faster than all of its layers the transformer is, at its chosen point."""
        return self._faster(batch, ALL_LAYERS, WITH_EXITS)

    def _faster(self, batch: int, slow: str, quick: str, clock: str = "processor") -> float:
        times = self.times[batch]
        return float(getattr(times[slow], clock) / getattr(times[quick], clock))

    def figures(self) -> dict[str, Any]:
        """For machines."""
        whole, course = course_totals()
        chosen, full = self.curve.chosen, max(self.full.accuracy, self.curve.full_accuracy)
        found: dict[str, Any] = {
            "macs_full_6000": whole,
            "macs_course": course,
            "mac_ratio": self.curve.mac_ratio,
            "accuracy": chosen.accuracy,
            "full_accuracy": full,
            "latency_ratio_batch1": self.latency_ratio(1),
            "latency_ratio_batch128": self.latency_ratio(128),
            "wall_ratio_batch1": self.latency_ratio(1, "wall"),
            "wall_ratio_batch128": self.latency_ratio(128, "wall"),
            "full_accuracy_without_exits": self.full.accuracy,
            "full_accuracy_last_exit": self.curve.full_accuracy,
            "validation_floor": self.floor,
            "chosen": chosen.figures(),
            "macs_full": self.curve.costs.full,
            "macs_exits": list(self.curve.costs.exits),
            "exit_accuracy": [whole for whole, _ in self.curve.exit_accuracies(self.test.labels)],
            "points": [p.figures() for p in self.curve.points],
            "static": [{"width": s.width, "accuracy": s.accuracy, "macs": s.macs} for s in self.statics],
            "seconds_per_picture": {
                str(batch): {name: asdict(taken) for name, taken in own.items()} for batch, own in self.times.items()
            },
        }
        if self.transformer is not None:
            found["transformer"] = self.transformer.chosen.figures() | {
                "mac_ratio": self.transformer.mac_ratio,
                "full_accuracy": self.transformer.full_accuracy,
                "latency_ratio_batch1": self.transformer_latency_ratio(1),
                "latency_ratio_batch128": self.transformer_latency_ratio(128),
                "macs_full": self.transformer.costs.full,
                "macs_exits": list(self.transformer.costs.exits),
                "exit_accuracy": [whole for whole, _ in self.transformer.exit_accuracies(self.test.labels)],
            }
        if self.depth is not None:
            found["depth_against_exit"] = spearman(self.depth, self.curve.exits[: len(self.depth)])
        return found


def make_study(
    bench: Bench,
    *,
    width: int,
    layout: str,
    weights: Sequence[float],
    narrower: Sequence[int],
    give_up: float,
    transformer_steps: int = TRANSFORMER.steps,
    with_depth: bool = True,
) -> Study:
    """Trains or loads all networks, then measures them; no transformer where it has no steps."""
    parts = bench.parts
    model = bench.exits(width, layout, weights)
    networks = {own: bench.static(own) for own in sorted({width, *narrower})}
    found, floor = curve_together(model, parts, give_up)
    contestants = contestants_of(model, found, networks)
    sequences: Curve | None = None
    if transformer_steps:
        transformer = bench.transformer(transformer_steps)
        sequences = curve(transformer, parts, TRANSFORMER_GIVE_UP)
        contestants |= {ALL_LAYERS: transformer.full, WITH_EXITS: _predicting(transformer, sequences.chosen.rule)}
    study = Study(
        parts.test,
        parts.classes,
        floor,
        found,
        [static(network, own, parts.test) for own, network in networks.items()],
        sequences,
        measure_latency(contestants, parts.test),
    )
    if with_depth:
        study.depth = prediction_depths(networks[width], parts)
    return study


def curve(model: EarlyExit, parts: Split, give_up: float) -> Curve:
    """Chooses one rule and tolerance for all exits on the validation images: the cheapest that loses at most `give_up`."""
    costs = exit_costs(model, parts.test.images[:1])
    logits = all_logits(model, parts.validation.images)
    tried = sweep(logits, parts.validation.labels, costs)
    return _judged(model, parts, costs, choose(tried, floor=accuracy_of(logits[-1], parts.validation) - give_up).rule)


def curve_together(model: EarlyExit, parts: Split, give_up: float) -> tuple[Curve, float]:
    """Chooses the tolerances of all exits together; also returns the accuracy that they must have on validation images.

    Args:
        give_up: accuracy that may be lost, with confidence, against the last exit. Against another network, whose errors are
            others, a few thousand images cannot show a loss of a point.
    """
    costs = exit_costs(model, parts.test.images[:1])
    ordering, testing = known(model, parts.train, ORDERING), known(model, parts.validation)
    rule = choose_together(ordering, testing, costs, allowed=give_up).rule
    return _judged(model, parts, costs, rule), accuracy_of(testing.logits[-1], parts.validation) - give_up


def _judged(model: EarlyExit, parts: Split, costs: ExitCosts, rule: Rule) -> Curve:
    """Everything on the test images."""
    logits, labels = all_logits(model, parts.test.images), parts.test.labels
    chosen = point(logits, labels, costs, rule)
    points = sweep(logits, labels, costs)
    full = accuracy_of(logits[-1], parts.test)
    return Curve(logits, costs.under(rule), points, chosen, decide(logits, rule), full)


def static(model: nn.Module, width: int, test: Part) -> Static:
    """Judges a network without exits."""
    return Static(width, accuracy_of(scores(model, test.images), test), macs(model, test.images[:1])[0])


def prediction_depths(network: nn.Module, parts: Split) -> Tensor:
    """Of the first test images, by nearest neighbours among training pictures."""
    places = torch.arange(min(DEPTHS, len(parts.test)))
    references = parts.train.take(torch.arange(min(REFERENCES, len(parts.train))))
    return measure(network, references, [parts.test.take(places)])[0].depth


def accuracy_of(logits: Tensor, part: Part) -> float:
    return float((logits.argmax(-1) == part.labels).double().mean())


def contestants_of(model: EarlyExit, found: Curve, statics: dict[int, nn.Module]) -> dict[str, Call]:
    """What is timed: the chosen point, some points of each rule and the networks without exits."""
    points = {point_name(p): p.rule for p in [found.chosen, *timed_points(found.points)]}
    calls: dict[str, Call] = {static_name(width): network for width, network in statics.items()}
    return calls | {name: _predicting(model, rule) for name, rule in points.items()}


def measure_latency(calls: dict[str, Call], test: Part, *, rounds: int = 5) -> dict[int, dict[str, Latency]]:
    """Times of all contestants in one run."""
    return {
        batch: latencies(calls, test.images[:count], min(batch, len(test)), rounds=rounds)
        for batch, count in TIMED.items()
    }


def timed_points(points: Sequence[Point]) -> list[Point]:
    """Some points of each rule, spread over the range of its MACs."""
    kept = []
    for name in RULES:
        own = sorted((p for p in points if name_of(p.rule) == name), key=lambda p: p.macs)
        if own:
            aims = torch.linspace(own[0].macs, own[-1].macs, PER_RULE).tolist()
            kept += [min(own, key=lambda p: abs(p.macs - aim)) for aim in aims]
    return list(dict.fromkeys(kept))


def point_name(p: Point) -> str:
    return words_of(p.rule)


def static_name(width: int) -> str:
    return f"static, width {width}"


def spearman(depth: Tensor, exits: Tensor) -> dict[str, float] | None:
    """Rank correlation and its p-value; None where all take the same exit or have the same depth."""
    from scipy.stats import spearmanr

    if len(depth.unique()) < 2 or len(exits.unique()) < 2:
        return None
    found = spearmanr(depth.numpy(), exits.numpy())
    return {"spearman": float(found.statistic), "p": float(found.pvalue)}


def _predicting(model: EarlyExit, rule: Rule) -> Call:
    return lambda images: model.predict(images, rule)
