"""linattn lab faces report: verification of unseen people, by one command."""

import argparse
import time
from pathlib import Path
from typing import Any

from .._commandline import command, describe, progress, require, table, write_json

HELP = """
Trains the default network on 30 people of the ORL faces and verifies the other 10, four times, for every seed; beside it
pixels, PCA and Fisherfaces on the same folds, kinds of mining, harmonic embeddings, and one thing changed at a
time: network, dimension, people, picture size, JPEG quality, bytes. About 20 minutes of two cores; a training that is
in --folder already is not done again, so a report that was stopped goes on.

examples:
  linattn lab faces report
  linattn lab faces report --json faces.json --html faces.html --picture faces.png
  linattn lab faces report --seeds 1 --no-ablations
"""

HEADING = ["1e-2", "1e-3", "pooled 1e-2", "pooled 1e-3", "AUC", "accuracy"]
KEYS = ["val_at_far_1e-2", "val_at_far_1e-3", "pooled_1e-2", "pooled_1e-3", "auc", "accuracy"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each fold (default %(default)s)")
    parser.add_argument("--steps", type=int, default=None, help="of each training (default: the recipe's)")
    parser.add_argument("--no-ablations", dest="ablations", action="store_false", help="leave the changes out")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("faces-report"), help="keeps each training's result (default %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures for machines")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with tables, plots and the worst pairs")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="write the plots alone")


@command
def run(args: argparse.Namespace) -> int:
    for name in ("seeds", "workers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}.")
    require("PIL", "sklearn", "scipy", "matplotlib", "safetensors", "tqdm", "pytorch_metric_learning")
    from ..data import orl_faces
    from .baselines import baselines
    from .protocol import fold_of, run_jobs, tested_pairs, variant
    from .recipe import Recipe
    from .study import Study

    start = time.monotonic()
    recipe = Recipe() if args.steps is None else variant(Recipe(), steps=args.steps)
    study = Study(recipe, args.seeds, args.ablations)
    results = run_jobs(study.jobs(), args.folder, args.workers, show=progress)
    faces, people = orl_faces()
    known = baselines(faces, people, fold_of(people))
    found = study.figures(results, {name: one for name, (one, _) in known.items()})
    found["minutes"] = (time.monotonic() - start) / 60
    print(text(found))
    if args.html or args.picture:
        from . import page, pictures

        default = tested_pairs(results, study.default[0], "vectors")
        curves = {"network": default} | {name: pairs for name, (_, pairs) in known.items()}
        if args.picture:
            pictures.draw(found, curves, args.picture)
            print(f"wrote {args.picture}")
        if args.html:
            page.write(found, curves, faces, args.html)
            print(f"wrote {args.html}")
    if args.json:
        write_json(args.json, found)
        print(f"wrote {args.json}")
    return 0


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
