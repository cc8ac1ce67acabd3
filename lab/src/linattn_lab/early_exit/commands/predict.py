"""linattn lab early-exit predict: images of the user's own."""

import argparse
from pathlib import Path

from ...commandline import add_output, describe, real, require, table, write_json
from ..rules import RULES
from .options import add_folder

HELP = """
Prints the class, the exit taken and its confidence for each image file. Rule and tolerance are those chosen by `sweep`
or `report`, unless given.

examples:
  linattn lab early-exit predict picture.png
  linattn lab early-exit predict photos/*.jpg --rule entropy --tolerance 0.2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("pictures", nargs="+", type=Path, metavar="PICTURE", help="files that Pillow reads")
    add_folder(parser)
    parser.add_argument("--rule", choices=list(RULES), help="with --tolerance")
    parser.add_argument("--tolerance", type=real(0), help="in nats, a probability, or a number of exits")
    add_output(parser, "--json", "write the answers for machines")


def run(args: argparse.Namespace) -> int:
    require("safetensors", "PIL")
    import torch

    from ...images.datasets import read_picture
    from ..rules import confidence, make_rule
    from ..training import load_exits, read_choice

    if (args.rule is None) != (args.tolerance is None):
        raise ValueError("--rule and --tolerance go together.")
    model, _, classes = load_exits(args.folder)
    rule = read_choice(args.folder) if args.rule is None else make_rule(args.rule, args.tolerance)
    settings = model.settings
    try:
        pixels = [read_picture(path, settings["side"], settings["channels"] == 1) for path in args.pictures]
    except OSError as error:
        raise ValueError(f"cannot read a picture: {error}") from error
    found = model.predict(torch.stack([torch.from_numpy(p.copy()) for p in pixels]).float() / 255, rule)
    sure = confidence(found.logits)
    answers = [
        {"picture": str(path), "class": classes[label], "exit": exit + 1, "confidence": probability}
        for path, label, exit, probability in zip(
            args.pictures, found.classes.tolist(), found.exits.tolist(), sure.tolist(), strict=True
        )
    ]
    rows = [["picture", "class", "exit", "confidence"]]
    for answer in answers:
        cells = [answer["picture"], answer["class"], f"{answer['exit']} of {len(model.stages)}"]
        rows.append([*map(str, cells), f"{answer['confidence']:.3f}"])
    print(table(rows, "  rr"))
    if args.json:
        write_json(args.json, answers)
    return 0
