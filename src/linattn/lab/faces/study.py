"""What the report measures: the default, kinds of mining, harmonic embeddings, and one thing changed at a time."""

from typing import Any

import numpy as np

from .evaluate import FARS, Pairs, cross_pairs, figures, interval, pairs_of
from .networks import build
from .protocol import QUALITIES, Job, over_folds, people_of, tested_pairs, variant
from .quantise import from_bytes, to_bytes
from .recipe import Recipe

Results = dict[Job, dict[str, np.ndarray]]
SIZES = ((32, 24), (40, 32), (56, 48))


class Study:
    """The jobs of a report, and its figures when they are done.

    Args:
        recipe: the default.
        seeds: how many for the default; two at most for semi-hard and random mining, one for all else.
            Mining and ablations have half the steps, their own default among them.
        ablations: whether to change one thing at a time.
    """

    def __init__(self, recipe: Recipe, seeds: int = 3, ablations: bool = True):
        self.recipe, self.seeds = recipe, seeds
        self.default = [over_folds(recipe, seed, jpeg=seed == 0) for seed in range(seeds)]
        # The classification beside the triplets would hide what mining does: the paper's loss alone.
        half = variant(recipe, steps=max(1, recipe.steps // 2))
        bare = variant(half, classes=0.0)
        several = {"semihard": min(2, seeds), "random": min(2, seeds), "random-violating": 1, "hard": 1, "all": 1}
        self.mining = {
            kind: [over_folds(variant(bare, mining=kind), seed) for seed in range(count)]
            for kind, count in several.items()
        }
        self.harmonic = over_folds(variant(recipe, steps=max(1, recipe.steps * 2 // 3), lr=recipe.lr / 2), 0, old=half)
        self.ablations: dict[str, dict[str, list[Job]]] = {}
        if ablations:
            self.ablations = {
                "network": {kind: _changed(half, kind=kind) for kind in ("small", "tiny", "transformer")},
                "dimension": {str(dim): _changed(half, dim=dim) for dim in (32, 128, 512)},
                "people in training": {str(n): _changed(half, people=n) for n in (10, 20, 30)},
                "image size": {f"{h} x {w}": _changed(half, size=(h, w)) for h, w in SIZES},
            }

    def jobs(self) -> list[Job]:
        """All, without repetition, the default first."""
        nested = [*self.default, self.harmonic, *(run for runs in self.mining.values() for run in runs)]
        nested += [jobs for settings in self.ablations.values() for jobs in settings.values()]
        return list(dict.fromkeys(job for jobs in nested for job in jobs))

    def figures(self, results: Results, baselines: dict[str, Any]) -> dict[str, Any]:
        """The report for machines."""
        runs = [tested_pairs(results, jobs, "vectors") for jobs in self.default]
        by_seed = [figures(run) for run in runs]
        found: dict[str, Any] = {name: float(np.mean([one[name] for one in by_seed])) for name in by_seed[0]}
        found["seeds"] = self.seeds
        found["interval_95"] = {_key(far): interval(runs, far) for far in FARS}
        found["by_seed"] = by_seed
        found["by_fold"] = [_mean([figures([run[k]]) for run in runs], "val") for k in range(len(runs[0]))]
        found["harmonic"], found["harmonic_1e-3"] = self._harmonic(results)
        found["mining"] = {
            kind: _mean([figures(tested_pairs(results, jobs, "plain")) for jobs in kinds]) | {"seeds": len(kinds)}
            for kind, kinds in self.mining.items()
        }
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

    def _harmonic(self, results: Results) -> tuple[dict[str, float], dict[str, float]]:
        """VAL at both rates of false acceptance, for pairs of old vectors, of a new with an old, and of new ones."""
        kinds: dict[str, list[Pairs]] = {"old_old": [], "new_old": [], "new_new": []}
        for job in self.harmonic:
            old, new, people = results[job]["old"], results[job]["vectors"], people_of(job.fold)
            for kind, (a, b) in {"old_old": (old, old), "new_old": (new, old), "new_new": (new, new)}.items():
                kinds[kind].append(cross_pairs(a, b, people))
        every = {kind: figures(folds) for kind, folds in kinds.items()}
        easy, strict = ({kind: one[_key(far)] for kind, one in every.items()} for far in FARS)
        return easy, strict

    def _bytes(self, results: Results) -> dict[str, dict[str, float]]:
        found = {}
        for bits in (32, 8, 4, 2, 1):
            folds = []
            for job in self.default[0]:
                vectors = results[job]["vectors"]
                folds.append(pairs_of(vectors if bits == 32 else from_bytes(to_bytes(vectors, bits)), people_of(job.fold)))
            found[str(self.recipe.spec.dim * bits // 8)] = figures(folds)
        return found


def _changed(recipe: Recipe, people: int = 30, **changes: Any) -> list[Job]:
    return over_folds(variant(recipe, **changes), 0, people=people % 30)  # 0 is all 30


def _mean(every: list[dict[str, float]], start: str = "") -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in every])) for name in every[0] if name.startswith(start)}


def _key(far: float) -> str:
    return f"val_at_far_1e{round(np.log10(far))}"
