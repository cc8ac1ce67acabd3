"""linattn lab faces train: an embedder from a folder of people."""

import argparse
from pathlib import Path

from ...commandline import describe, real, require, seed, whole

HELP = """
Learns an embedding from a folder with a folder of images for each person (`photos/ada/1.jpg`), in which the distance
of two images says whether they show one person. Images may be of any size and format that Pillow reads; broken
files are named and left out. It works for any images sorted into folders, as long as they are cut to their object.

A share of the people is held out: their pairs choose the threshold and say how well unseen people are told apart.
Stopped and started again with the same --model, it continues from its last checkpoint.

examples:
  linattn lab faces train photos --model faces-model
  linattn lab faces train photos --model colour --colour --size 64 64 --steps 400
  linattn lab faces train orl --model orl-model          (the ORL faces, fetched)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..networks import KINDS
    from ..training.mining import KINDS as MINING
    from ..training.recipe import Recipe

    recipe = Recipe()
    describe(parser, HELP)
    parser.add_argument("photos", metavar="PHOTOS", help="a folder with a folder for each person, or `orl`")
    parser.add_argument("--model", metavar="FOLDER", type=Path, default=Path("faces-model"), help="written to")
    parser.add_argument("--network", choices=list(KINDS), default=recipe.spec.kind, help="kind of network")
    parser.add_argument(
        "--size", type=whole(), nargs=2, metavar=("HEIGHT", "WIDTH"), default=recipe.spec.size, help="pixels"
    )
    parser.add_argument("--colour", action="store_true", help="red, green and blue; by default grey")
    parser.add_argument(
        "--dim", type=whole(), default=recipe.spec.dim, help="length of the vectors (default %(default)s)"
    )
    parser.add_argument("--mining", choices=list(MINING), default=recipe.mining, help="how triplets are chosen")
    parser.add_argument("--classes", type=real(0), default=recipe.classes, help="weight of the classification; 0: none")
    parser.add_argument("--no-mirror", dest="mirror", action="store_false", help="mirror images are not further people")
    parser.add_argument("--steps", type=whole(), default=recipe.steps, help="of training")
    parser.add_argument("--people", type=whole(), default=recipe.people, help="in a batch (default %(default)s)")
    parser.add_argument(
        "--pictures", type=whole(), default=recipe.pictures, help="of each of them (default %(default)s)"
    )
    parser.add_argument("--lr", type=real(above=0), default=recipe.lr, help="highest learning rate")
    parser.add_argument(
        "--held-out", type=real(above=0, most=1), default=0.2, help="share of the people (default %(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of everything random (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    require("PIL", "scipy", "safetensors", "tqdm", "pytorch_metric_learning")
    from ...training.lock import training_lock
    from ..networks import NetworkSpec
    from ..training import fit as learn
    from ..training.recipe import Recipe

    spec = NetworkSpec(args.network, tuple(args.size), 3 if args.colour else 1, args.dim)
    recipe = Recipe(
        spec,
        mining=args.mining,
        classes=args.classes,
        mirror=args.mirror,
        steps=args.steps,
        people=args.people,
        pictures=args.pictures,
        lr=args.lr,
    )
    pictures = learn.read(args.photos, spec)
    print(pictures.report())
    with training_lock(args.model):
        embedder = learn.learn(recipe, pictures, args.held_out, args.seed, args.model)
        embedder.save(args.model)
    about = embedder.about
    print(
        f"trained on {about['people']} people; of {about['held_out_people']} others, {about['val_at_far_1e-2']:.3f} of the "
        f"pairs of one person are accepted with 1 % of the pairs of two\n"
        f"threshold {embedder.threshold:.3f} (squared distance): right for {about['accuracy']:.3f} of them\n"
        f"wrote {args.model}"
    )
    return 0
