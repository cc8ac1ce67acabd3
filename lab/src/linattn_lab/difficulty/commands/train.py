"""linattn lab difficulty train: the networks whose depth is measured."""

import argparse

from ...commandline import describe, require, table

HELP = """
Trains the ResNet-18 classifiers that `measure` probes. Each of the --seeds networks has its own seed and holds out a
different part of the training images, so that every training image can be measured with a network that has not seen it.

The images are shapes in noise (generated, with noise, size, place and angle known), Fashion-MNIST, dSprites (both are
fetched on first use), or your own: a folder that holds a folder of images for each class, of any size and format.
A run that was stopped continues where it stopped when the same command is given again.

examples:
  linattn lab difficulty train
  linattn lab difficulty train --data fashion --seeds 2
  linattn lab difficulty train --data photos/ --width 32 --augment --folder photos-depth
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .options import add_run

    describe(parser, HELP)
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    require("safetensors", "tqdm", "tensorboard")
    from ...images import accuracy
    from .options import run_from, watched

    chosen = run_from(args)
    images = chosen.images()
    nets = chosen.train(images, show=watched())
    rows = [["network", "accuracy on the test pictures"]]
    rows += [[str(net + 1), f"{accuracy(model, images.test):.4f}"] for net, model in enumerate(nets)]
    print(table(rows, "rr"))
    print(f"wrote {chosen.folder}")
    return 0
