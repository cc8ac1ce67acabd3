"""The experiments of the report: the default, kinds of mining, harmonic embeddings, and ablations."""

from typing import Any

import numpy as np

from ..index.quantization import from_bytes, to_bytes
from ..networks import build
from ..training.mining import KINDS
from ..training.recipe import Recipe
from ..verification.metrics import FARS, Pairs, cross_pairs, figures, interval, pairs_of
from .orl_protocol import QUALITIES, Job, over_folds, people_of, tested_pairs, variant

Results = dict[Job, dict[str, np.ndarray]]
SIZES = ((32, 24), (40, 32), (56, 48))
# Mining shows in how fast is learned: few steps, with the rate that is best for semi-hard and for random triplets alike;
# and many steps, after which everything in a batch is told apart, with the rate that is best there.
QUICK, SLOW = (30, 4e-3), (150, 1e-3)


class Study:
    """The jobs of a report, and its figures when they are done.

    Args:
        recipe: the default.
        seeds: how many for the default, harmonic embeddings and kinds of mining (twice as many for semi-hard and random
            ones); one for all else. Ablations have half the steps, their own default among them.
        ablations: whether to change one thing at a time.
    """

    def __init__(self, recipe: Recipe, seeds: int = 3, ablations: bool = True):
        self.recipe, self.seeds = recipe, seeds
        self.default = [over_folds(recipe, seed, jpeg=seed == 0) for seed in range(seeds)]
        half = variant(recipe, steps=max(1, recipe.steps // 2))
        twice = ("semihard", "random")
        self.mining = {kind: self._mined(kind, *QUICK, seeds * (2 if kind in twice else 1)) for kind in KINDS}
        self.mining_slow = {kind: self._mined(kind, *SLOW, seeds) for kind in twice}
        old = variant(half, kind="tiny", size=(40, 32))
        new = variant(old, steps=max(1, recipe.steps * 2 // 3), lr=recipe.lr / 10)
        self.harmonic = [over_folds(new, seed, old=old) for seed in range(seeds)]
        self.ablations: dict[str, dict[str, list[Job]]] = {}
        if ablations:
            self.ablations = {
                "network": {kind: _changed(half, kind=kind) for kind in ("small", "tiny", "transformer")},
                "dimension": {str(dim): _changed(half, dim=dim) for dim in (32, 128, 512)},
                "people in training": {str(n): _changed(half, people=n) for n in (10, 20, 30)},
                "image size": {f"{h} x {w}": _changed(half, size=(h, w)) for h, w in SIZES},
            }

    def _mined(self, kind: str, steps: int, lr: float, seeds: int) -> list[list[Job]]:
        """Trainings with the paper's loss alone: the classification beside it would hide what mining does."""
        steps = min(steps, self.recipe.steps)
        recipe = variant(self.recipe, kind="tiny", size=SIZES[0], classes=0.0, mining=kind, steps=steps, lr=lr)
        return [over_folds(recipe, seed) for seed in range(seeds)]

    def jobs(self) -> list[Job]:
        """All, without repetition, the default first."""
        kinds = [*self.mining.values(), *self.mining_slow.values()]
        nested = [*self.default, *self.harmonic, *(run for runs in kinds for run in runs)]
        nested += [jobs for settings in self.ablations.values() for jobs in settings.values()]
        return list(dict.fromkeys(job for jobs in nested for job in jobs))

    def figures(self, results: Results, baselines: dict[str, Any]) -> dict[str, Any]:
        """The report as JSON."""
        runs = [tested_pairs(results, jobs, "vectors") for jobs in self.default]
        by_seed = [figures(run) for run in runs]
        found: dict[str, Any] = {name: float(np.mean([one[name] for one in by_seed])) for name in by_seed[0]}
        found["seeds"] = self.seeds
        found["interval_95"] = {_key(far): interval(runs, far) for far in FARS}
        found["by_seed"] = by_seed
        found["by_fold"] = [_mean([figures([run[k]]) for run in runs], "val") for k in range(len(runs[0]))]
        found |= self._harmonic(results) | self._mining(results)
        found["baselines"] = baselines
        found["without_whitening"] = _mean([figures(tested_pairs(results, jobs, "plain")) for jobs in self.default])
        found["bytes"] = self._bytes(results)
        found["jpeg"] = {str(q): figures(tested_pairs(results, self.default[0], f"jpeg-{q}")) for q in QUALITIES}
        found["ablations"] = {
            name: {setting: figures(tested_pairs(results, jobs, "vectors")) for setting, jobs in settings.items()}
            for name, settings in self.ablations.items()
        }
        kinds = self.ablations.get("network", {"small": []})
        specs = {kind: variant(self.recipe, kind=kind).spec for kind in kinds}
        found["parameters"] = {kind: sum(p.numel() for p in build(spec).parameters()) for kind, spec in specs.items()}
        found["core_minutes"] = sum(float(results[job]["seconds"]) for job in self.jobs()) / 60
        return found

    def default_runs(self, results: Results, part: str = "vectors") -> list[list[Pairs]]:
        """Pairs of the folds of each seed."""
        return [tested_pairs(results, jobs, part) for jobs in self.default]

    def harmonic_runs(self, results: Results) -> dict[str, list[list[Pairs]]]:
        """Pairs of old vectors, of a new one with an old one, and of new ones."""

        def runs(first: str, second: str) -> list[list[Pairs]]:
            every = [[(results[job], people_of(job.fold)) for job in jobs] for jobs in self.harmonic]
            return [[cross_pairs(one[first], one[second], people) for one, people in run] for run in every]

        return {
            "old-old": runs("old", "old"),
            "new-old": runs("vectors", "old"),
            "new-new": runs("vectors", "vectors"),
        }

    def mining_runs(self, results: Results) -> dict[str, list[list[Pairs]]]:
        """Pairs of each kind of mining, after few steps and after many."""
        every = {f"{kind}, {QUICK[0]} steps": jobs for kind, jobs in self.mining.items()}
        every |= {f"{kind}, {SLOW[0]} steps": jobs for kind, jobs in self.mining_slow.items()}
        return {name: [tested_pairs(results, jobs, "vectors") for jobs in kinds] for name, kinds in every.items()}

    def compared_mining(self, results: Results) -> list[list[list[Pairs]]]:
        """Pairs of semi-hard and of random triplets after few steps."""
        kinds = (self.mining["semihard"], self.mining["random"])
        return [[tested_pairs(results, jobs, "vectors") for jobs in every] for every in kinds]

    def changed_runs(self, results: Results) -> dict[str, list[list[Pairs]]]:
        """Pairs with one thing changed at a time."""
        return {
            f"{name} {setting}": [tested_pairs(results, jobs, "vectors")]
            for name, settings in self.ablations.items()
            for setting, jobs in settings.items()
        }

    def _harmonic(self, results: Results) -> dict[str, Any]:
        """VAL at both rates of false acceptance."""
        kinds = {name.replace("-", "_"): runs for name, runs in self.harmonic_runs(results).items()}
        every = {kind: _mean([figures(run) for run in runs]) for kind, runs in kinds.items()}
        easy, strict = ({kind: one[_key(far)] for kind, one in every.items()} for far in FARS)
        return {
            "harmonic": easy,
            "harmonic_1e-3": strict,
            "harmonic_gain_95": {_key(far): interval(kinds["new_old"], far, kinds["old_old"]) for far in FARS},
        }

    def _mining(self, results: Results) -> dict[str, Any]:
        """Figures of each kind, and how far semi-hard triplets are above random ones over the seeds."""

        def runs(kinds: list[list[Job]], part: str = "vectors") -> list[list[Pairs]]:
            return [tested_pairs(results, jobs, part) for jobs in kinds]

        def means(every: dict[str, list[list[Job]]], part: str = "vectors") -> dict[str, dict[str, float]]:
            return {
                kind: _mean([figures(run) for run in runs(kinds, part)])
                | {"seeds": len(kinds), "steps": kinds[0][0].recipe.steps}
                for kind, kinds in every.items()
            }

        semihard, random = runs(self.mining["semihard"]), runs(self.mining["random"])
        return {
            "mining": means(self.mining),
            "mining_before_whitening": means(self.mining, "plain"),
            "mining_slow": means(self.mining_slow),
            "mining_gain_95": {_key(far): interval(semihard, far, random) for far in FARS},
        }

    def _bytes(self, results: Results) -> dict[str, dict[str, float]]:
        found = {}
        for bits in (32, 8, 4, 2, 1):
            folds = []
            for job in self.default[0]:
                vectors = results[job]["vectors"]
                folds.append(
                    pairs_of(vectors if bits == 32 else from_bytes(to_bytes(vectors, bits)), people_of(job.fold))
                )
            found[str(self.recipe.spec.dim * bits // 8)] = figures(folds)
        return found


def _changed(recipe: Recipe, people: int = 30, **changes: Any) -> list[Job]:
    return over_folds(variant(recipe, **changes), 0, people=people % 30)  # 0 is all 30


def _mean(every: list[dict[str, float]], start: str = "") -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in every])) for name in every[0] if name.startswith(start)}


def _key(far: float) -> str:
    return f"val_at_far_1e{round(np.log10(far))}"
