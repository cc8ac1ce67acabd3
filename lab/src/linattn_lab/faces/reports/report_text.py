"""The report as text: tables of VAL@FAR for the network, the baselines and the ablations."""

from typing import Any

from ...commandline import table

HEADING = ["1e-2", "1e-3", "pooled 1e-2", "pooled 1e-3", "AUC", "accuracy"]
KEYS = ["val_at_far_1e-2", "val_at_far_1e-3", "pooled_1e-2", "pooled_1e-3", "auc", "accuracy"]


def text(found: dict[str, Any]) -> str:
    """The report for people."""
    parts = ["ORL, 4 folds of 10 unseen people; VAL@FAR as mean over folds, and with one threshold for all folds\n"]
    rows = [["", *HEADING]]
    rows += [_row(name, one) for name, one in found["baselines"].items()]
    rows += [_row("network, before whitening", found["without_whitening"]), _row("network", found)]
    parts.append(table(rows, " rrrrrr"))
    low, high = found["interval_95"]["val_at_far_1e-2"], found["interval_95"]["val_at_far_1e-3"]
    seeds = [_list(found["by_seed"], far) for far in ("1e-2", "1e-3")]
    parts.append(
        f"\n95 % over people: {low[0]:.3f} to {low[1]:.3f} at 1e-2, {high[0]:.3f} to {high[1]:.3f} at 1e-3"
        f"\nby seed: {seeds[0]} at 1e-2; {seeds[1]} at 1e-3"
        f"\nby fold: {_list(found['by_fold'], '1e-2')} at 1e-2; {_list(found['by_fold'], '1e-3')} at 1e-3"
    )
    rows = [["harmonic embeddings", "1e-2", "1e-3"]]
    rows += [
        [k.replace("_", "-"), f"{x:.3f}", f"{found['harmonic_1e-3'][k]:.3f}"] for k, x in found["harmonic"].items()
    ]
    parts.append("\n" + table(rows, " rr"))
    parts.append(_gain("new-old above old-old", found["harmonic_gain_95"]))
    for name, settings in sections(found).items():
        parts.append("\n" + table([[name, *HEADING], *(_row(k, one) for k, one in settings.items())], " rrrrrr"))
        if settings is found["mining"]:
            parts.append(_gain("semi-hard above random", found["mining_gain_95"]))
    parts.append(f"\nfitted in {found['core_minutes']:.1f} core-minutes; this run took {found['minutes']:.1f} minutes")
    return "\n".join(parts)


def sections(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was changed, by name."""
    quick, slow = (f"mining, {found[name]['semihard']['steps']} steps" for name in ("mining", "mining_slow"))
    parts = {
        quick: found["mining"],
        f"{quick}, before whitening": found["mining_before_whitening"],
        slow: found["mining_slow"],
        "bytes per embedding": found["bytes"],
        "JPEG quality": found["jpeg"],
    }
    return parts | found["ablations"]


def _gain(what: str, gain: dict[str, tuple[float, float]]) -> str:
    low, high = gain["val_at_far_1e-2"], gain["val_at_far_1e-3"]
    return f"{what}, 95 % over people: {low[0]:+.3f} to {low[1]:+.3f} at 1e-2, {high[0]:+.3f} to {high[1]:+.3f} at 1e-3"


def _list(every: list[dict[str, float]], far: str) -> str:
    return ", ".join(f"{one[f'val_at_far_{far}']:.3f}" for one in every)


def _row(name: str, one: dict[str, float]) -> list[str]:
    return [name, *(f"{one[key]:.3f}" for key in KEYS)]
