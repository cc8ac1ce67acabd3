"""linattn lab faces train: an embedder from a folder of people."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...commandline import describe, real, require, seed, whole
from .gallery import load_embedder

if TYPE_CHECKING:
    from ..embedder import Embedder
    from ..networks import NetworkSpec

HELP = """
Learns an embedding from a folder with a folder of images for each person (`photos/ada/1.jpg`), in which the distance
of two images says whether they show one person. Images may be of any size and format that Pillow reads; broken
files are named and left out. It works for any images sorted into folders, as long as they are cut to their object.

The threshold is chosen for the rate of false accepts of --far, on people that the network has not seen: they are parted
into --folds groups, each is held out from a training of its own, and the model that is kept is trained on everyone. So
it takes --folds trainings and one. --held-out takes one training, and leaves those people out of the model.
Stopped and started again with the same --model, it continues from its last checkpoint.

--old MODEL begins with a model of before and keeps the new vectors comparable with the old ones: `search --model NEW`
then finds faces in an index that MODEL made, which need not be embedded again.

examples:
  linattn lab faces train photos --model faces-model
  linattn lab faces train photos --model colour --colour --size 64 64 --steps 400
  linattn lab faces train orl --model orl-model          (the ORL faces, fetched)
  linattn lab faces train photos --far 0.001             (one false accept in 1000)
  linattn lab faces train photos --old faces-model --model new-model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..networks import KINDS
    from ..training.fit import Choice
    from ..training.mining import KINDS as MINING
    from ..training.recipe import Recipe

    recipe, choice = Recipe(), Choice()
    describe(parser, HELP)
    parser.add_argument("photos", metavar="PHOTOS", help="a folder with a folder for each person, or `orl`")
    parser.add_argument("--model", metavar="FOLDER", type=Path, default=Path("faces-model"), help="written to")
    parser.add_argument(
        "--old", metavar="MODEL", type=Path, help="stay comparable with its vectors; the network is of the same kind"
    )
    parser.add_argument(
        "--far",
        type=real(above=0, most=0.5),
        default=choice.far,
        help="share of the pairs of two people that may be accepted (default %(default)s)",
    )
    parser.add_argument("--network", choices=list(KINDS), help=f"kind of network (default {recipe.spec.kind})")
    parser.add_argument(
        "--size",
        type=whole(),
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="pixels (default {} {})".format(*recipe.spec.size),
    )
    parser.add_argument("--colour", action="store_true", help="red, green and blue; by default grey")
    parser.add_argument("--dim", type=whole(), help=f"length of the vectors (default {recipe.spec.dim})")
    parser.add_argument("--mining", choices=list(MINING), default=recipe.mining, help="how triplets are chosen")
    parser.add_argument("--classes", type=real(0), default=recipe.classes, help="weight of the classification; 0: none")
    parser.add_argument("--no-mirror", dest="mirror", action="store_false", help="mirror images are not further people")
    parser.add_argument("--steps", type=whole(), default=recipe.steps, help="of training")
    parser.add_argument("--people", type=whole(), default=recipe.people, help="in a batch (default %(default)s)")
    parser.add_argument(
        "--pictures", type=whole(), default=recipe.pictures, help="of each of them (default %(default)s)"
    )
    parser.add_argument(
        "--lr", type=real(above=0), help=f"highest learning rate (default {recipe.lr}; beside --old a tenth of it)"
    )
    held = parser.add_mutually_exclusive_group()
    held.add_argument(
        "--folds",
        type=whole(2, 100),
        default=choice.folds,
        help="groups of people that are held out in turn (default %(default)s)",
    )
    held.add_argument(
        "--held-out", type=real(above=0, most=1), default=0.0, help="a share of the people, held out for good"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of everything random (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    require("PIL", "scipy", "safetensors", "tqdm", "pytorch_metric_learning")
    from ...training.lock import training_lock
    from ..training import fit as learn
    from ..training.recipe import Recipe

    old = None if args.old is None else load_embedder(args.old)
    if args.old is not None and args.old.resolve() == args.model.resolve():
        raise ValueError(f"--old and --model both name {args.old}: the new model needs a folder of its own.")
    spec = _spec(args, old)
    recipe = Recipe(
        spec,
        mining=args.mining,
        classes=args.classes,
        mirror=args.mirror,
        steps=args.steps,
        people=args.people,
        pictures=args.pictures,
        lr=args.lr or Recipe.lr / (1 if old is None else 10),
    )
    pictures = learn.read(args.photos, spec)
    print(pictures.report())
    pictures.labels()  # raises for images without a person, before there is a folder for the model
    choice = learn.Choice(args.far, args.folds, args.held_out)
    with training_lock(args.model):
        embedder = learn.learn(recipe, pictures, choice, args.seed, args.model, old=old)
        embedder.save(args.model)
    about = embedder.about
    print(f"trained on {about['people']} people\n{about['said']}\nwrote {args.model}")
    if old is not None:
        print(f"`linattn lab faces search PICTURE --index INDEX --model {args.model}` searches an index of {args.old}")
    return 0


def _spec(args: argparse.Namespace, old: "Embedder | None") -> "NetworkSpec":
    """The network that was asked for; that of the old model, from which the new one begins."""
    from ..networks import NetworkSpec

    base = NetworkSpec() if old is None else old.spec
    wanted = NetworkSpec(
        args.network or base.kind,
        base.size if args.size is None else tuple(args.size),
        3 if args.colour else base.channels,
        args.dim or base.dim,
    )
    if old is not None and wanted != base:
        raise ValueError(
            f"{args.old} is {base.kind}, {base.size[0]} x {base.size[1]}, {base.channels} channels, {base.dim} numbers, and "
            "beside --old the new model is the same: leave --network, --size, --colour and --dim out."
        )
    return wanted
