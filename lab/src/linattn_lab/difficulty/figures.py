"""What the docs print of a run: accuracy by depth, correlations with the truth and mean depth of the classes, with intervals.

An interval has two parts, added as squares: 1.96 standard deviations of a bootstrap over images, and the jackknife's
standard error over networks times Student's t. Images make the first matter, the luck of a training the second.
"""

import math

import numpy as np
from scipy.stats import t as student

from ..figures import Figure
from ..images import ImageSet
from .depth import bands
from .runs import Outcome
from .statistics import correlations, rank_correlation

Array = np.ndarray
DRAWS = 100


class _Run:
    """Depths and answers of all networks, and any figure of a part of the networks and of the images."""

    def __init__(self, outcome: Outcome, images: ImageSet):
        first = outcome.test[0]
        places = first.places.numpy()
        self.classes, self.labels = images.classes, first.labels.numpy()
        self.truth = {name: values[places] for name, values in images.test.truth.items()}
        self.test = [(part.depth.numpy(), part.right.numpy()) for part in outcome.test]
        self.held_out = [(part.depth.numpy(), part.right.numpy()) for part in outcome.held_out]
        self.bands = bands(len(outcome.points) + 1)

    def figures(self, nets: list[int], rows: Array, held_rows: list[Array]) -> dict[str, float]:
        """All figures with these networks, these test images, and of each network these held-out images."""
        found: dict[str, float] = {}
        parts = {
            "test": [(depth[rows], right[rows]) for depth, right in (self.test[net] for net in nets)],
            "held out": [
                (self.held_out[net][0][held_rows[net]], self.held_out[net][1][held_rows[net]]) for net in nets
            ],
        }
        for name, pairs in parts.items():
            depth, right = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
            for first, last in self.bands:
                inside = (first <= depth) & (depth <= last)
                if inside.any():
                    found[f"accuracy|{first}-{last}|{name}"] = float(right[inside].mean())
                    found[f"accuracy|{first}-{last}|share of {name}"] = float(inside.mean())
            if len(depth):
                found[f"accuracy|all|{name}"] = float(right.mean())
        mean = np.mean([depth for depth, _ in parts["test"]], 0)
        truth = {name: values[rows] for name, values in self.truth.items()}
        found |= {f"correlation|{name}|Spearman": rho for name, (rho, _) in correlations(mean, truth).items()}
        if len(nets) > 1:
            depths = [depth for depth, _ in parts["test"]]
            both = [rank_correlation(depths[a], depths[b])[0] for a in range(len(nets)) for b in range(a)]
            found["correlation|depth in another network|Spearman"] = float(np.mean(both))
        labels = self.labels[rows]
        for number, name in enumerate(self.classes):
            if (labels == number).any():
                found[f"classes|{name.replace('_', ' ')}|mean depth"] = float(mean[labels == number].mean())
        return {key: value for key, value in found.items() if math.isfinite(value)}


def figures_of(outcome: Outcome, images: ImageSet, seeds: tuple[int, ...]) -> dict[str, Figure]:
    run, generator = _Run(outcome, images), np.random.default_rng(0)
    nets, count = list(range(len(run.test))), len(run.labels)
    whole = [np.arange(len(depth)) for depth, _ in run.held_out]
    values = run.figures(nets, np.arange(count), whole)
    draws = [
        run.figures(
            nets,
            generator.integers(count, size=count),
            [generator.integers(max(1, len(x)), size=len(x)) for x in whole],
        )
        for _ in range(DRAWS)
    ]
    left = []
    if len(nets) > 2:
        left = [run.figures([net for net in nets if net != out], np.arange(count), whole) for out in nets]
    return {key: _figure(key, value, draws, left, seeds) for key, value in values.items()}


def _figure(
    key: str, value: float, draws: list[dict[str, float]], left: list[dict[str, float]], seeds: tuple[int, ...]
) -> Figure:
    reach = (1.96 * float(np.std([one[key] for one in draws if key in one]))) ** 2
    others = [one[key] for one in left if key in one]
    if len(others) > 1:
        error = math.sqrt((len(others) - 1) / len(others) * float(np.sum((np.array(others) - np.mean(others)) ** 2)))
        reach += (float(student.ppf(0.975, len(others) - 1)) * error) ** 2
    low, high = value - math.sqrt(reach), value + math.sqrt(reach)
    if key.startswith(("accuracy", "correlation")):
        low, high = max(0.0 if key.startswith("accuracy") else -1.0, low), min(1.0, high)
    form = {"accuracy": ".3f", "correlation": "+.3f"}.get(key.split("|")[0], ".2f")
    return Figure(value, low, high, seeds, form)
