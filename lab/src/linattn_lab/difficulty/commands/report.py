"""linattn lab difficulty report: what prediction depth says about the pictures."""

import argparse
import math
from typing import TYPE_CHECKING

from ...commandline import add_output, describe, require, table, write_json
from ...figures import add_figures, save_figures

if TYPE_CHECKING:
    from ..statistics import Findings

HELP = """
Trains and measures what is missing, then reports the distribution of depths, how accuracy falls with depth, the
easiest and the hardest images, the classes by depth, the correlation of depth with the true noise
and size where they are known, and the agreement between seeds. Writes one HTML page, and figures as JSON.

The shapes take a few minutes on one core. Measurements are cached: a second report takes seconds.

examples:
  linattn lab difficulty report
  linattn lab difficulty report --data fashion --json fashion.json
  linattn lab difficulty report --data photos/ --folder photos-depth --page photos.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .options import add_probing, add_run

    describe(parser, HELP)
    add_output(parser, "--page", "the page (default report.html in the folder)")
    add_output(parser, "--picture", "also the main findings in one picture (.png)", suffixes=(".png",))
    add_output(parser, "--json", "write the figures for machines")
    add_figures(parser)
    add_run(parser)
    add_probing(parser)


def run(args: argparse.Namespace) -> int:
    require("safetensors", "tqdm", "tensorboard", "matplotlib", "scipy")
    from ...images.figures import save_picture
    from ..page import introduction, write_page
    from ..plots import overview
    from ..runs import measure_run
    from ..statistics import find, for_machines
    from .options import probing_from, run_from, watched

    chosen, probing = run_from(args), probing_from(args)
    images = chosen.images()
    outcome = measure_run(chosen, images, chosen.train(images, show=watched()), probing)
    findings = find(outcome, images)
    rows = figure_rows(findings, images.classes)
    text = introduction(chosen, probing, outcome)
    print(f"Prediction depth: {images.name}\n{text}\n")
    print(table(rows))
    page = args.page or chosen.folder / "report.html"
    write_page(page, findings, outcome, images, text, rows)
    print(f"\nwrote {page}")
    if args.picture:
        save_picture(overview(findings, outcome, images), args.picture)
        print(f"wrote {args.picture}")
    if args.json:
        write_json(args.json, for_machines(findings))
        print(f"wrote {args.json}")
    if args.figures:
        from ..figures import figures_of

        seeds = tuple(chosen.config.seed + net for net in range(chosen.seeds))
        save_figures(args, figures_of(outcome, images, seeds))
    return 0


def figure_rows(findings: "Findings", classes: tuple[str, ...]) -> list[list[str]]:
    """The figures as rows of two cells, a heading first."""
    from ..statistics import say_p

    rows = [["figure", "value"]]
    rows.append(["accuracy of the networks, test", ", ".join(f"{value:.4f}" for value in findings.accuracy)])
    for title, found in (("test", findings.test), ("training, held out", findings.held_out)):
        if found:
            for name, accuracy, count in zip(found.names(), found.accuracy, found.counts, strict=True):
                rows.append([f"accuracy at depth {name}, {title}", f"{accuracy:.4f}  ({count} pictures)"])
            each = ", ".join(f"{depth}: {accuracy:.3f}" for depth, _, accuracy in found.single)
            rows.append([f"accuracy at each depth, {title}", each])
    for name, (rho, p) in (findings.truth | findings.apart).items():
        rows.append([f"Spearman of depth and {name}", f"{rho:+.4f}  ({say_p(p)})"])
    order = sorted(
        (depth, name) for depth, name in zip(findings.class_depth, classes, strict=True) if not math.isnan(depth)
    )
    rows.append(["classes by mean depth", ", ".join(f"{name.replace('_', ' ')} {depth:.2f}" for depth, name in order)])
    if findings.agreement is not None:
        rows.append(["Spearman of depths, between networks", f"{findings.agreement:+.4f}"])
    return rows
