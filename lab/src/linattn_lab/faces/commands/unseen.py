"""linattn lab faces unseen: do the threshold and the clusters of `train` hold for people that it has not seen?"""

import argparse
from typing import TYPE_CHECKING

from ...commandline import add_output, describe, progress, real, require, table, whole, write_json
from ...figures import add_figures, save_figures
from .gallery import add_trainings

if TYPE_CHECKING:
    import numpy as np

    from ..reports.unseen import UnseenJob

HELP = """
Does what `train` does with 30 people of the ORL faces, and looks at the other 10: the rate of false accepts (FAR) and of
right ones (VAL) at the threshold that was chosen for --far, and the pairwise F1 of clusters at the cut that was chosen.
Four folds, so that everyone is unseen once, and several seeds. About 5 minutes of one core for each seed; what is in
--folder already is not trained again.

FAR of a fold hangs on few people: 10 people make 45 pairs of people, and one pair that looks alike may double it.

examples:
  linattn lab faces unseen
  linattn lab faces unseen --seeds 1 --far 0.001 --json unseen.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..training.fit import Choice

    choice = Choice()
    describe(parser, HELP)
    parser.add_argument(
        "--far", type=real(above=0, most=0.5), default=choice.far, help="rate of false accepts (default %(default)s)"
    )
    parser.add_argument(
        "--folds", type=whole(2, 15), default=choice.folds, help="groups held out by `train` (default %(default)s)"
    )
    add_trainings(parser, "faces-unseen")
    add_output(parser, "--json", "write what came of each fold and seed for machines")
    add_figures(parser)


def run(args: argparse.Namespace) -> int:
    require("PIL", "sklearn", "scipy", "safetensors", "tqdm", "pytorch_metric_learning")
    from ..reports.clusterings import compare
    from ..reports.orl_protocol import FOLDS, run_jobs, variant
    from ..reports.unseen import COLUMNS, UnseenJob, facts_of, figures_of, look
    from ..training.fit import Choice
    from ..training.recipe import Recipe

    recipe = Recipe() if args.steps is None else variant(Recipe(), steps=args.steps)
    choice = Choice(args.far, args.folds)
    jobs = [UnseenJob(recipe, choice, fold, seed) for seed in range(args.seeds) for fold in range(FOLDS)]
    results = run_jobs(jobs, args.folder, args.workers, show=progress)
    seen = [look(job, results[job]) for job in jobs]
    rows = [["people", "seed", "threshold", "95 %", "cut", *COLUMNS]]
    for one in seen:
        value, low, high = one.threshold
        cells = [f"{10 * one.fold + 1} to {10 * one.fold + 10}", str(one.seed), f"{value:.3f}"]
        cells += [f"{low:.3f} to {high:.3f}", f"{one.cut:.2f}", f"{one.figures['FAR']:.4f}"]
        rows.append([*cells, *(f"{one.figures[name]:.3f}" for name in COLUMNS[1:3]), f"{one.figures['clusters']:.0f}"])
    print(f"ORL, 4 folds of 10 unseen people; threshold chosen for a rate of false accepts of {args.far:g}\n")
    print(table(rows, " rrrrrrrr"))
    found = figures_of(seen)
    compared = compare(
        {seed: [_fold(job, results[job]["vectors"]) for job in jobs if job.seed == seed] for seed in range(args.seeds)}
    )
    print("\nmean over seeds, 95 % over people (F1 and clusters of all folds: over folds)\n")
    names = list(dict.fromkeys(key.split("|")[1] for key in found))
    lines = [["", *COLUMNS]]
    for name in names:
        every = [found[f"unseen|{name}|{column}"] for column in COLUMNS]
        lines.append([name, *(f"{one.text()} ({one.interval()})" for one in every)])
    print(table(lines, " rrrr"))
    print("\nways to cluster: pairwise F1, what is free in each chosen on the other folds (95 % over folds)\n")
    lines = [["", *dict.fromkeys(key.split("|")[2] for key in compared)]]
    for name in dict.fromkeys(key.split("|")[1] for key in compared):
        own = [one for key, one in compared.items() if key.split("|")[1] == name]
        lines.append([name, *(f"{one.text()} ({one.interval()})" for one in own)])
    print(table(lines, " rr"))
    minutes = sum(float(results[job]["seconds"]) for job in jobs) / 60
    print(f"\nfitted in {minutes:.1f} core-minutes")
    if args.json:
        write_json(args.json, {"far": args.far, "runs": facts_of(seen), "core_minutes": minutes})
        print(f"wrote {args.json}")
    save_figures(args, found | compared)
    return 0


def _fold(job: "UnseenJob", vectors: "np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
    from ..reports.orl_protocol import people_of

    return vectors, people_of(job.fold)
