"""linattn lab faces embed: a folder of images into an index."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...commandline import add_output, describe, require, write_json
from .gallery import add_index, add_model, check_same_network, load_embedder, open_index

if TYPE_CHECKING:
    from ..embedder import Embedder
    from ..index import FaceIndex

HELP = """
Reads a folder of images, `person/picture` or flat, and puts their embeddings into an index for search and cluster. An
index grows: run it again with the same folder or another one, and only new images are computed. An image is known by
its contents, so copies count once, and one that was moved to another person's folder gets the new name. Files that
cannot be read are named and passed over. A run that was killed continues where it stopped.

Images should show one face, cut out as those were that the model was trained on; there is no face detector here.

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
    add_output(parser, "--json", "write the counts and the broken files for machines")


def run(args: argparse.Namespace) -> int:
    require("PIL", "safetensors")
    from ..index.add_folder import add_folder, files_of
    from ..text import counted

    files_of(args.photos)
    embedder = load_embedder(args.model)
    index = open_or_create(args, embedder)
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


def open_or_create(args: argparse.Namespace, embedder: "Embedder") -> "FaceIndex":
    """The index of --index, made if there is none; two processes may ask for a new one at the same time."""
    from ..index import FaceIndex, IndexExists

    manifest: Path = args.index / "index.json"
    if not manifest.is_file():
        used = args.index.exists() and (not args.index.is_dir() or any(map(_is_foreign, args.index.iterdir())))
        if used and not manifest.is_file():  # asked again: another process may have made one meanwhile
            raise ValueError(f"{args.index} is there and is no index: name a new or empty folder by --index.")
        about = {
            "network": embedder.digest(),
            "model": str(args.model.absolute()),
            "threshold": embedder.threshold,
            "cut": embedder.cut,
        }
        try:
            return FaceIndex.create(args.index, embedder.dim, args.storage or "float32", **about)
        except IndexExists:
            pass  # another process was first
    index = open_index(args.index)
    check_same_network(index, embedder)
    if args.storage not in (None, index.settings["storage"]):
        raise ValueError(
            f"{args.index} stores {index.settings['storage']}: leave --storage out, or name another --index."
        )
    return index


def _is_foreign(path: Path) -> bool:
    """Whether a file is not one that an interrupted `create` left."""
    return path.name not in ("index.json", "index.lock") and not path.name.startswith(".linattn-")
