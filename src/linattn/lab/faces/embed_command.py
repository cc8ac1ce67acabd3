"""linattn lab faces embed: a folder of pictures into an index."""

import argparse
from dataclasses import asdict
from pathlib import Path

from .._commandline import command, describe, require, write_json
from .sources import add_index, add_model, check_same_network, load_embedder, open_index

HELP = """
Reads a folder of pictures, `person/picture` or flat, and puts their embeddings into an index for search and cluster. An
index grows: run it again with the same folder or another one, and only new pictures are computed. A picture is known by
its contents, so copies count once, and one that was moved to another person's folder gets the new name. Files that
cannot be read are named and passed over. A run that was killed goes on where it stopped.

Pictures should show one face, cut out as those were that the model was trained on; there is no face detector here.

examples:
  linattn lab faces embed photos                              # with faces-model, into faces-index
  linattn lab faces embed photos --index small --storage int8 # 128 bytes a face instead of 512
  linattn lab faces embed photos --prune                      # and forget pictures that are no longer on disk
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("photos", metavar="PHOTOS", type=Path, help="folder of person/picture files, or of pictures")
    add_model(parser)
    add_index(parser, "to make or to add to")
    parser.add_argument(
        "--storage", choices=["float32", "int8"], help="of a new index: 4 bytes or 1 byte a number (default float32)"
    )
    parser.add_argument("--prune", action="store_true", help="take pictures out of the index that are gone from disk")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the counts and the broken files for machines")


@command
def run(args: argparse.Namespace) -> int:
    require("PIL", "safetensors")
    from .gather import add_folder, files_of
    from .index import FaceIndex
    from .words import counted

    files_of(args.photos)
    embedder = load_embedder(args.model)
    if (args.index / "index.json").is_file():
        index = open_index(args.index)
        check_same_network(index, embedder)
        if args.storage not in (None, index.settings["storage"]):
            raise ValueError(
                f"{args.index} stores {index.settings['storage']}: leave --storage out, or name another --index."
            )
    else:
        if args.index.exists() and (not args.index.is_dir() or any(args.index.iterdir())):
            raise ValueError(f"{args.index} is there and is no index: name a new or empty folder by --index.")
        about = {
            "network": embedder.digest(),
            "model": str(args.model.absolute()),
            "threshold": embedder.threshold,
        }
        index = FaceIndex.create(args.index, embedder.dim, args.storage or "float32", **about)
    tally = add_folder(index, args.photos, embedder, prune=args.prune)
    print(tally.report())
    if args.json:
        broken = {str(path): reason for path, reason in tally.broken}
        unread = [str(path) for path in tally.unread]
        doubtful = {str(path): str(other) for path, other in tally.doubtful}
        write_json(
            args.json,
            {**asdict(tally), "broken": broken, "doubtful": doubtful, "unread": unread, "pictures": len(index)},
        )
        print(f"wrote {args.json}")
    people = {face.person for face in index.faces if face.person is not None}
    size = index.settings["dim"] * (1 if index.settings["storage"] == "int8" else 4)
    known = f" of {counted(len(people), 'person', 'people')}" if people else ""
    print(f"{args.index} holds {counted(len(index), 'picture')}{known}, {size} bytes each")
    return 0
