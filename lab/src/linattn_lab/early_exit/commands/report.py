"""linattn lab early-exit report: trains, measures and writes the report."""

import argparse
from pathlib import Path

from ...commandline import PLOT_SUFFIXES, add_output, describe, require, table, whole, write_json
from ..backbones import PATCH
from ..training import TRANSFORMER
from .options import add_folder, add_give_up, add_training, bench_from

HELP = """
Trains what is not yet in FOLDER (the network with exits, the same without, narrower ones, a transformer with linear
attention), chooses a rule and its tolerance on validation images, and measures on test images: accuracy, MACs and
time over a sweep of tolerances of three rules, beside the networks without exits. One page, and figures as JSON.

On shapes that takes about a quarter of an hour of one core; what is in FOLDER is used again.

examples:
  linattn lab early-exit report
  linattn lab early-exit report --html early-exit.html --picture early-exit.png --json early-exit.json
  linattn lab early-exit report --data photos/ --folder photos-exits --side 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_folder(parser)
    add_training(parser)
    add_give_up(parser)
    parser.add_argument("--static", type=whole(), nargs="*", default=[4, 8], metavar="WIDTH", help="narrower networks")
    parser.add_argument(
        "--transformer-steps", type=whole(0), default=TRANSFORMER.steps, help="0 leaves it out (default %(default)s)"
    )
    parser.add_argument("--no-depth", action="store_true", help="leave prediction depth out")
    add_output(parser, "--html", "the page", default=Path("early-exit.html"))
    add_output(parser, "--picture", "the curves alone (.png, .svg or .pdf)", suffixes=PLOT_SUFFIXES)
    add_output(parser, "--json", "write the figures for machines")


def run(args: argparse.Namespace) -> int:
    require("matplotlib", "scipy", "sklearn", "tqdm", "tensorboard", "safetensors")
    from .. import page
    from ..macs import CONVENTION
    from ..study import make_study
    from ..training import write_choice

    wide = [width for width in args.static if width >= args.width]
    if wide:
        raise ValueError(f"--static are narrower networks than --width {args.width}, got {wide[0]}.")
    bench = bench_from(args)
    if args.transformer_steps and bench.side % PATCH:
        raise ValueError(
            f"the transformer takes pictures whose side {PATCH} divides, got {bench.side}: "
            "choose another --side, or --transformer-steps 0."
        )
    study = make_study(
        bench,
        width=args.width,
        layout=args.layout,
        weights=args.weights,
        narrower=args.static,
        give_up=args.give_up,
        transformer_steps=args.transformer_steps,
        with_depth=not args.no_depth,
    )
    write_choice(args.folder, study.curve.chosen.rule)
    print(page.summary(study) + "\n")
    print(table(page.comparison(study), " rrrr") + "\n")
    print(table(page.exit_rows(study.curve, study), " rrrr") + "\n")
    if study.transformer is not None:
        print(page.transformer_sentence(study) + "\n")
        print(table(page.exit_rows(study.transformer, study), " rrrr") + "\n")
    if study.depth is not None:
        print(page.depth_sentence(study))
    print(CONVENTION)
    page.write_page(study, args.html)
    print(f"wrote {args.html}")
    if args.picture:
        page.save_picture(study, args.picture)
        print(f"wrote {args.picture}")
    if args.json:
        write_json(args.json, study.figures())
        print(f"wrote {args.json}")
    return 0
