"""linattn lab faces search: the nearest faces in an index."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...commandline import add_output, describe, require, table, whole, write_json
from ..index.search import FAISS_BEYOND
from .gallery import add_index, add_model, add_threshold, open_index, searcher_of

if TYPE_CHECKING:
    import numpy as np

    from ..embedder import Embedder
    from ..index import Face
    from ..index.add_folder import Tally

HELP = """
Lists the faces in an index that are nearest to an image, and marks those within the threshold for the same person.
The search is exact; large indexes are searched with faiss, with the same result.

--model may name a newer model: one that was trained with --old, naming the model that made the index. The images to look
for are then embedded by the new model, the faces of the index stay as they are, and the threshold is that for such pairs.

examples:
  linattn lab faces search unknown.jpg
  linattn lab faces search *.jpg -k 10 --html found.html
  linattn lab faces search unknown.jpg --index faces-index --model new-model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("pictures", metavar="PICTURE", type=Path, nargs="+", help="pictures of one face each")
    add_index(parser)
    add_model(parser, None, "the one that made the index; or one trained with `--old` beside it")
    add_threshold(parser)
    parser.add_argument("-k", type=whole(), default=5, help="how many faces to show (default %(default)s)")
    add_output(parser, "--html", "write a page with the pictures")
    add_output(parser, "--json", "write the answers for machines")
    parser.add_argument(
        "--faiss-beyond",
        metavar="N",
        type=whole(0),
        default=FAISS_BEYOND,
        help="let faiss search indexes with more faces (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    require("PIL", "safetensors")
    from ..text import printable, short

    index = open_index(args.index)
    embedder, threshold = searcher_of(index, args.model)
    if len(index) == 0:
        raise ValueError(f"{args.index} is empty: `linattn lab faces embed PHOTOS --index {args.index}` adds pictures.")
    if len(index) > args.faiss_beyond:
        require("faiss")
    faces, queries, tally = _read(args.pictures, embedder)
    for path, reason in tally.broken:
        print(printable(f"linattn: {path} was skipped: {reason}"), file=sys.stderr)
    if not faces:
        return 2
    threshold = threshold if args.threshold is None else args.threshold
    distances, places = index.search(queries, args.k + 1, faiss_beyond=args.faiss_beyond)
    found: list[dict[str, Any]] = []
    for face, row, line in zip(faces, distances, places, strict=True):
        hits = [
            {"file": other.file, "person": other.person, "distance": float(d), "same": bool(d <= threshold)}
            for d, other in zip(row, (index.faces[place] for place in line), strict=True)
            if other.digest != face.digest
        ]
        found.append({"picture": face.file, "itself": face.digest in index, "found": hits[: args.k]})
    for answer in found:
        print(printable(f"{short(answer['picture'])}: {_verdict(answer, threshold)}\n"))
        rows = [["", "distance", "same", "person", "file"]]
        for place, hit in enumerate(answer["found"], 1):
            same = "yes" if hit["same"] else "no"
            rows.append([str(place), f"{hit['distance']:.3f}", same, hit["person"] or "-", short(hit["file"])])
        if len(rows) > 1:
            print(printable(table(rows, "rr")) + "\n")
    if args.html:
        _page(args.html, found, threshold, len(index))
        print(f"wrote {args.html}")
    if args.json:
        write_json(args.json, {"threshold": threshold, "faces": len(index), "answers": found})
        print(f"wrote {args.json}")
    return 2 if tally.broken else 0


def _read(paths: list[Path], embedder: "Embedder") -> "tuple[list[Face], np.ndarray, Tally]":
    from ..index import Face, file_digest
    from ..index.add_folder import Tally, embed_faces

    tally, known = Tally(), []
    for path in paths:
        try:
            known.append(Face(str(path), None, file_digest(path)))
        except OSError as error:
            tally.broken.append((path, error.strerror or str(error)))
    faces, queries = embed_faces(known, embedder, tally)
    return faces, queries, tally


def _verdict(answer: dict[str, Any], threshold: float) -> str:
    hits = answer["found"]
    if not hits:
        return "it is the only picture in the index"
    near = [hit for hit in hits if hit["same"]]
    names = list(dict.fromkeys(hit["person"] for hit in near if hit["person"] is not None))
    if names:
        text = f"looks like {' or '.join(names[:3])}"
    else:
        text = f"{len(near)} faces are near enough, with no name" if near else "nobody in the index"
    text += f" (nearest {hits[0]['distance']:.3f}, threshold {threshold:.3f})"
    return text + (", the picture itself left out" if answer["itself"] else "")


def _page(path: Path, found: list[dict[str, Any]], threshold: float, faces: int) -> None:
    from ..reports.contact_sheet import Group, Shown
    from ..reports.image_page import write_image_page

    note = f"The nearest of {faces} faces. Faces beyond the threshold {threshold:.3f} are faint."
    groups = []
    for answer in found:
        shown = [Shown(answer["picture"], "looked for")]
        for hit in answer["found"]:
            name = hit["person"] or Path(hit["file"]).name
            shown.append(Shown(hit["file"], f"{name}, {hit['distance']:.3f}", "" if hit["same"] else "far"))
        title = f"{Path(answer['picture']).name}: {_verdict(answer, threshold)}"
        groups.append(Group(title, shown))
    write_image_page(path, "Faces found", [note], groups=groups, most=1000)
