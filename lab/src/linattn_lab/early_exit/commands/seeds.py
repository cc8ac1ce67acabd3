"""linattn lab early-exit seeds: the same training with several seeds and numbers of threads."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from ...commandline import add_output, describe, progress, require, table, whole, write_json
from ...commandline import seed as seed_type
from ...figures import add_figures, save_figures
from .options import add_folder, add_training, pictures_from

HELP = """
Trains the network with exits anew with each seed and each number of threads (sums in another order give other
weights), chooses tolerances on validation images, and judges by five bars: 3 times fewer MACs, 2 times less time in
batches of 1 and of 128, an accuracy of 0.9, and at most a point less than the full network. Times are the
processor's, of one thread, in turns with a network without exits.

Each run is kept in FOLDER: what was stopped goes on where it was.

examples:
  linattn lab early-exit seeds --seeds 0 1 2 3 4 --threads 1 2 --json seeds.json
  linattn lab early-exit seeds --seeds 7 --threads 1 --without-exits 7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_folder(parser)
    parser.add_argument(
        "--seeds",
        type=seed_type,
        nargs="+",
        default=[0, 1, 2, 3, 4],
        metavar="N",
        help="trained anew with each (default 0 1 2 3 4)",
    )
    parser.add_argument(
        "--threads",
        type=whole(),
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="and with so many threads each (default 1 2)",
    )
    parser.add_argument(
        "--without-exits",
        type=seed_type,
        nargs="*",
        default=[],
        metavar="N",
        help="seeds with which a network without exits is trained too, to be compared in accuracy",
    )
    parser.add_argument("--without-times", action="store_true", help="judge by MACs and accuracy alone")
    add_training(parser)
    add_output(parser, "--json", "write every run for machines")
    add_figures(parser)


def run(args: argparse.Namespace) -> int:
    require("scipy", "tqdm", "tensorboard", "safetensors")
    from ...training.config import config_from
    from ..seeds import figures_of, measure, rows_of, summary_rows
    from ..training import Bench

    if len(args.weights) != 4 or args.layout != "conv":
        raise ValueError("the bars are for the layout conv.")
    if args.figures and len(set(args.seeds)) < 2:
        raise ValueError("--figures have intervals over seeds: give two --seeds or more.")
    pictures = pictures_from(args)
    parts = pictures.split()
    pairs = [(seed, threads) for seed in dict.fromkeys(args.seeds) for threads in dict.fromkeys(args.threads)]
    runs = []
    for seed, threads in progress(pairs, desc="runs", unit="run"):
        folder: Path = args.folder / f"seed-{seed}-threads-{threads}"
        config = replace(config_from(args), seed=seed)
        bench = Bench(folder, pictures, config, distill_steps=args.distill_steps, parts=parts, show=not args.quiet)
        options = {"with_static": seed in args.without_exits, "timed": not args.without_times}
        runs.append(measure(bench, width=args.width, weights=args.weights, threads=threads, **options))
        print(table(rows_of(runs[-1:]), "rrrrrrrrr").splitlines()[-1], flush=True)
    print("\n" + table(rows_of(runs), "rrrrrrrrr") + "\n")
    if len(set(args.seeds)) > 1:
        print(table(summary_rows(runs), " rrrrl"))
    if args.json:
        write_json(args.json, [asdict(one) | {"full": one.full, "lost": one.lost} for one in runs])
        print(f"wrote {args.json}")
    if args.figures:
        save_figures(args, figures_of(runs))
    return 0
