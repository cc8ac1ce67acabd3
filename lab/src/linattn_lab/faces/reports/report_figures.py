"""What the docs print of the report: VAL at both rates of false accepts, each with its interval over people."""

import numpy as np

from ...figures import Figure
from ..verification.metrics import FARS, Pairs, interval, val_at_far
from .study import Results, Study

Runs = list[list[Pairs]]  # the folds of each seed


def figures_of(study: Study, results: Results, baselines: dict[str, list[Pairs]]) -> dict[str, Figure]:
    """Tables `verification`, `harmonic`, `mining` and `changed`; gains are in pairs, over the same draws of people."""
    tables: dict[str, dict[str, Runs]] = {
        "verification": {name: [folds] for name, folds in baselines.items()}
        | {
            "network, before whitening": study.default_runs(results, "plain"),
            "network": study.default_runs(results),
        },
        "harmonic": study.harmonic_runs(results),
        "mining": study.mining_runs(results),
        "changed": study.changed_runs(results),
    }
    found: dict[str, Figure] = {}
    for table, rows in tables.items():
        for row, runs in rows.items():
            for far in FARS:
                found[f"{table}|{row}|{_name(far)}"] = _value(runs, far)
    gains = {
        "new-old above old-old": (tables["harmonic"]["new-old"], tables["harmonic"]["old-old"]),
        "semi-hard above random": tuple(study.compared_mining(results)),
    }
    for row, (runs, against) in gains.items():
        for far in FARS:
            found[f"gain|{row}|{_name(far)}"] = _value(runs, far, against)
    return found


def _value(runs: Runs, far: float, against: Runs | None = None) -> Figure:
    value = _mean(runs, far) - (0.0 if against is None else _mean(against, far))
    low, high = interval(runs, far, against)
    form = ".3f" if against is None else "+.3f"
    return Figure(value, min(low, value), max(high, value), tuple(range(len(runs))), form)


def _mean(runs: Runs, far: float) -> float:
    return float(np.mean([[val_at_far(fold, far) for fold in run] for run in runs]))


def _name(far: float) -> str:
    return f"VAL@FAR 1e{round(np.log10(far))}"
