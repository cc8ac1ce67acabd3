"""linattn lab difficulty measure: the prediction depth of test and of held-out training pictures."""

import argparse

from .._commandline import command, describe, require, table

HELP = """
Measures prediction depth. At 11 points of each network (input, stem, four stages, pooling, output) a probe gives a picture
the class that most of its k nearest training pictures have at that point. Its depth is the first probe from which all
agree with the network: 0 where the pixels settle it, 11 where even the last probe says otherwise.

Trains first what is not trained yet. One point at a time is held in memory, and of the training pictures a portion.

examples:
  linattn lab difficulty measure
  linattn lab difficulty measure --folder difficulty-fashion
  linattn lab difficulty measure --k 10 --references 30000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .arguments import add_probing, add_run

    describe(parser, HELP)
    add_run(parser)
    add_probing(parser)


@command
def run(args: argparse.Namespace) -> int:
    require("safetensors", "tqdm", "tensorboard")
    from .arguments import probing_from, run_from, watched
    from .runs import measure_run

    chosen, probing = run_from(args), probing_from(args)
    images = chosen.images()
    outcome = measure_run(chosen, images, chosen.train(images, show=watched()), probing)
    rows = [["network", "pictures", "mean depth", "accuracy"]]
    for kind, parts in (("test", outcome.test), ("held out", outcome.held_out)):
        for net, part in enumerate(parts):
            if len(part.labels):
                depth, right = part.depth.double().mean(), part.right.double().mean()
                rows.append([str(net + 1), f"{len(part.labels)} {kind}", f"{depth:.2f}", f"{right:.4f}"])
    print(table(rows, "rrrr"))
    print(f"wrote {chosen.folder}")
    return 0
