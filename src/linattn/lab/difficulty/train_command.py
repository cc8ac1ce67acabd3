"""linattn lab difficulty train: the networks whose depth is measured."""

import argparse

from .._commandline import command, describe, require, table

HELP = """
Trains ResNet-18 classifiers of pictures, of which `measure` then asks how deep into the network each picture's class is
settled. Each of the --seeds networks has a seed of its own and leaves out another part of the training pictures, so that
every training picture can be judged by a network that has not seen it.

The pictures are shapes in noise (generated, with noise, size, place and angle known), Fashion-MNIST, dSprites (both are
fetched on first use), or your own: a folder that holds a folder of pictures for each class, of any size and format.
A run that was stopped goes on where it was when the same command is given again.

examples:
  linattn lab difficulty train
  linattn lab difficulty train --data fashion --seeds 2
  linattn lab difficulty train --data photos/ --width 32 --augment --folder photos-depth
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .arguments import add_run

    describe(parser, HELP)
    add_run(parser)


@command
def run(args: argparse.Namespace) -> int:
    require("safetensors", "tqdm", "tensorboard")
    from ..images import accuracy
    from .arguments import run_from, watched

    chosen = run_from(args)
    images = chosen.images()
    nets = chosen.train(images, show=watched())
    rows = [["network", "accuracy on the test pictures"]]
    rows += [[str(net + 1), f"{accuracy(model, images.test):.4f}"] for net, model in enumerate(nets)]
    print(table(rows, "rr"))
    print(f"wrote {chosen.folder}")
    return 0
