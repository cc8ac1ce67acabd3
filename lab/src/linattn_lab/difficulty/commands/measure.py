"""linattn lab difficulty measure: the prediction depth of test and of held-out training pictures."""

import argparse

from ...commandline import describe, require, table

HELP = """
Measures prediction depth. At 11 points of each network (input, stem, four stages, pooling, output) a probe gives an image
the class that most of its k nearest training images have at that point. Its depth is the first probe from which all
agree with the network: 0 if the pixels already determine it, 11 if even the last probe disagrees.

Networks whose training was stopped are finished first. One point at a time is held in memory, and a portion of the
training pictures.

examples:
  linattn lab difficulty measure
  linattn lab difficulty measure --folder difficulty-fashion
  linattn lab difficulty measure --k 10 --references 30000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .options import add_probing, add_run

    describe(parser, HELP)
    add_run(parser)
    add_probing(parser)


def run(args: argparse.Namespace) -> int:
    require("safetensors", "tqdm", "tensorboard")
    from ..runs import SETTINGS, measure_run
    from .options import probing_from, run_from, watched

    chosen, probing = run_from(args), probing_from(args)
    if not (chosen.folder / SETTINGS).is_file():
        what = "holds no networks" if chosen.folder.is_dir() else "does not exist"
        raise ValueError(
            f"{chosen.folder} {what}: `linattn lab difficulty train --folder {chosen.folder}` trains them, "
            "--folder names another."
        )
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
