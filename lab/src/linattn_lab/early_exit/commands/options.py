"""Options that the commands share."""

import argparse
from pathlib import Path

from ...commandline import real, whole
from ...training.config import add_flags, config_from
from ..backbones import LAYOUTS
from ..distill import DEFAULTS as DISTILL
from ..training import DEFAULTS, WEIGHTS, Bench, Pictures


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, default=Path("early-exit"), help="where the networks are kept (default %(default)s)"
    )


def add_give_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--give-up",
        type=real(0, most=1),
        default=0.01,
        help="accuracy that may be lost, as the validation pictures show with 90 %% confidence (default %(default)s)",
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    """What to train on, what to train, and how."""
    parser.add_argument(
        "--data",
        default="shapes",
        help="shapes, fashion, dsprites, or a folder of pictures by class (default %(default)s)",
    )
    parser.add_argument("--train", type=whole(), help="training pictures, those for validation included (default all)")
    parser.add_argument("--test", type=whole(), help="test pictures (default all)")
    parser.add_argument(
        "--validation",
        type=whole(),
        help="training pictures kept to choose tolerances on (default a fifth, at most 3000)",
    )
    parser.add_argument(
        "--side", type=whole(), default=32, help="pixels that pictures of a folder are scaled to (default %(default)s)"
    )
    parser.add_argument("--noise", type=real(0), default=0.45, help="largest noise of the shapes (default %(default)s)")
    parser.add_argument("--width", type=whole(), default=16, help="channels of the first stage (default %(default)s)")
    parser.add_argument(
        "--layout",
        choices=list(LAYOUTS),
        default="conv",
        help="heads: convolutions, or the course's (default %(default)s)",
    )
    parser.add_argument(
        "--weights",
        type=real(0),
        nargs=4,
        default=list(WEIGHTS),
        metavar="W",
        help="of the exits' losses, first to last",
    )
    parser.add_argument(
        "--distill-steps",
        type=whole(0),
        default=DISTILL.steps,
        help="steps in which the last exit teaches the first ones; 0 leaves it out (default %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_flags(parser, DEFAULTS)


def pictures_from(args: argparse.Namespace) -> Pictures:
    return Pictures(args.data, args.train, args.test, args.validation, args.noise, args.side)


def bench_from(args: argparse.Namespace) -> Bench:
    """The networks of the folder, trained as the options say."""
    return Bench(
        args.folder, pictures_from(args), config_from(args), distill_steps=args.distill_steps, show=not args.quiet
    )
