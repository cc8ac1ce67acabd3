"""linattn lab early-exit train: a network with exits."""

import argparse

from ...commandline import describe, require
from .options import add_folder, add_training, bench_from

HELP = """
Trains a ResNet-18 with four exits on the weighted sum of their losses and keeps it in FOLDER/exits. A run that was
stopped continues where it stopped.

examples:
  linattn lab early-exit train
  linattn lab early-exit train --data fashion --folder clothes
  linattn lab early-exit train --data photos/ --layout linear --weights 1 0.3 0.3 0.3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_folder(parser)
    add_training(parser)


def run(args: argparse.Namespace) -> int:
    require("tqdm", "tensorboard", "safetensors")
    from ..sweep import all_logits

    bench = bench_from(args)
    model = bench.exits(args.width, args.layout, args.weights)
    part = bench.parts.validation
    right = (all_logits(model, part.images).argmax(-1) == part.labels).double().mean(-1)
    print("accuracy of the exits on validation pictures: " + ", ".join(f"{x:.4f}" for x in right.tolist()))
    print(f"wrote {args.folder / 'exits'}")
    return 0
