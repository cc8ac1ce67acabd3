"""linattn lab faces report: verification of unseen people, by one command."""

import argparse
import time

from ...commandline import PLOT_SUFFIXES, add_output, describe, progress, require, write_json
from ...figures import add_figures, save_figures
from .gallery import add_trainings

HELP = """
Trains the default network on 30 people of the ORL faces and verifies the other 10, four times, for every seed; beside it
pixels, PCA and Fisherfaces on the same folds, kinds of mining, harmonic embeddings, and one thing changed at a
time: network, dimension, people, image size, JPEG quality, bytes. About 20 minutes of two cores; a training that is
in --folder already is not done again, so a report that was stopped continues.

examples:
  linattn lab faces report
  linattn lab faces report --json faces.json --html faces.html --picture faces.png
  linattn lab faces report --seeds 1 --no-ablations
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_trainings(parser, "faces-report")
    parser.add_argument("--no-ablations", dest="ablations", action="store_false", help="leave the changes out")
    add_output(parser, "--json", "write the figures for machines")
    add_figures(parser)
    add_output(parser, "--html", "write a page with tables, plots and the worst pairs")
    add_output(parser, "--picture", "write the plots alone (.png, .svg or .pdf)", suffixes=PLOT_SUFFIXES)


def run(args: argparse.Namespace) -> int:
    require("PIL", "sklearn", "scipy", "matplotlib", "safetensors", "tqdm", "pytorch_metric_learning")
    from ...data import orl_faces
    from ..reports.orl_protocol import fold_of, run_jobs, tested_pairs, variant
    from ..reports.report_text import text
    from ..reports.study import Study
    from ..training.recipe import Recipe
    from ..verification.baselines import baselines

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
        from ..reports import plots, report_page

        default = tested_pairs(results, study.default[0], "vectors")
        curves = {"network": default} | {name: pairs for name, (_, pairs) in known.items()}
        if args.picture:
            plots.draw(found, curves, args.picture)
            print(f"wrote {args.picture}")
        if args.html:
            report_page.write(found, curves, faces, args.html)
            print(f"wrote {args.html}")
    if args.json:
        write_json(args.json, found)
        print(f"wrote {args.json}")
    if args.figures:
        from ..reports.report_figures import figures_of

        save_figures(args, figures_of(study, results, {name: pairs for name, (_, pairs) in known.items()}))
    return 0
