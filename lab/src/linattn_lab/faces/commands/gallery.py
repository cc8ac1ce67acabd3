"""Shared by the commands: options for model and index, and images with embeddings from an index or a folder."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...commandline import whole

if TYPE_CHECKING:
    from ..embedder import Embedder
    from ..index import Face, FaceIndex

MODEL, INDEX = Path("faces-model"), Path("faces-index")


@dataclass
class Gallery:
    """Images with their embeddings, from wherever."""

    faces: "list[Face]"
    embeddings: np.ndarray  # (N, dim)
    threshold: float
    cut: float  # where clustering stops: what was said by --threshold, or the model's
    title: str


def add_trainings(parser: argparse.ArgumentParser, folder: str) -> None:
    """--seeds, --steps, --workers and --folder of a command that trains on the folds of ORL."""
    parser.add_argument("--seeds", type=whole(), default=3, help="trainings of each fold (default %(default)s)")
    parser.add_argument("--steps", type=whole(), help="of each training (default: the recipe's)")
    parser.add_argument(
        "--workers", type=whole(1, 256), default=2, help="processes of one thread each (default %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(folder), help="keeps each training's result (default %(default)s)"
    )


def add_model(parser: argparse.ArgumentParser, default: Path | None = MODEL, otherwise: str = str(MODEL)) -> None:
    text = f"from `linattn lab faces train` (default {otherwise})"
    parser.add_argument("--model", metavar="FOLDER", type=Path, default=default, help=text)


def add_index(parser: argparse.ArgumentParser, text: str = "from `linattn lab faces embed`") -> None:
    parser.add_argument(
        "--index",
        metavar="FOLDER",
        type=Path,
        default=INDEX,
        help=f"{text} (default %(default)s)",
    )


def add_threshold(
    parser: argparse.ArgumentParser, text: str = "squared distance up to which two faces are one person"
) -> None:
    parser.add_argument("--threshold", type=_threshold, help=f"{text} (default: the model's)")


def add_gallery(
    parser: argparse.ArgumentParser, what: str, threshold: str = "squared distance up to which two faces are one person"
) -> None:
    """A folder of images or an index, the model and the threshold."""
    parser.add_argument("photos", metavar="PHOTOS", type=Path, nargs="?", help=f"folder of {what} (default: the index)")
    add_index(parser)
    add_model(parser, None, f"the one that made the index; for PHOTOS {MODEL}")
    add_threshold(parser, threshold)


def load_embedder(folder: Path) -> "Embedder":
    """The model of a folder, or a ValueError that says how to make one."""
    from ..embedder import Embedder

    if not (folder / "embedder.json").is_file():
        raise ValueError(
            f"there is no model in {folder}: `linattn lab faces train PHOTOS --model {folder}` makes one, "
            "`--model FOLDER` names another."
        )
    return Embedder.load(folder)


def open_index(folder: Path) -> "FaceIndex":
    """The index of a folder, or a ValueError that says how to make one."""
    from ..index import FaceIndex

    if not (folder / "index.json").is_file():
        raise ValueError(
            f"there is no index in {folder}: `linattn lab faces embed PHOTOS --index {folder}` makes one, "
            "`--index FOLDER` names another."
        )
    return FaceIndex(folder)


def searcher_of(index: "FaceIndex", model: Path | None) -> "tuple[Embedder, float]":
    """What may search an index, and its threshold there: the model that made it, or a newer one trained beside that one."""
    embedder = load_embedder(Path(index.settings["model"]) if model is None else model)
    old = embedder.about.get("old") or {}
    if old.get("network") == index.settings["network"]:
        return embedder, float(old["threshold"])
    check_same_network(index, embedder)
    return embedder, embedder.threshold


def embedder_of(index: "FaceIndex", model: Path | None) -> "Embedder":
    """The model that made an index; another one is refused, because its distances would mean nothing."""
    embedder = load_embedder(Path(index.settings["model"]) if model is None else model)
    check_same_network(index, embedder)
    return embedder


def check_same_network(index: "FaceIndex", embedder: "Embedder") -> None:
    if index.settings["network"] != embedder.digest():
        raise ValueError(
            f"{index.folder} was made with another network (it was in {index.settings['model']}): name that one by --model, "
            "or embed the pictures anew into another --index."
        )


def load_gallery(args: argparse.Namespace) -> Gallery:
    """What `add_gallery` asked for."""
    if args.photos is None:
        index = open_index(args.index)
        threshold, cut = (args.threshold,) * 2 if args.threshold is not None else _numbers_of(index, args.model)
        embeddings = index.embeddings()  # first: it follows what another process adds meanwhile
        return Gallery(index.faces, embeddings, threshold, cut, str(args.index))
    from ..index.add_folder import read_faces

    if (args.photos / "index.json").is_file():
        raise ValueError(f"{args.photos} is an index: name it by --index {args.photos}.")
    embedder = load_embedder(args.model or MODEL)
    faces, embeddings, tally = read_faces(args.photos, embedder)
    print(tally.report())
    threshold, cut = (args.threshold,) * 2 if args.threshold is not None else (embedder.threshold, embedder.cut)
    return Gallery(faces, embeddings, threshold, cut, str(args.photos))


def _numbers_of(index: "FaceIndex", model: Path | None) -> tuple[float, float]:
    """The model's threshold and cut as they are now; those noted in the index where the model is gone."""
    if model is None and not (Path(index.settings["model"]) / "embedder.json").is_file():
        threshold = float(index.settings["threshold"])
        return threshold, float(index.settings.get("cut", threshold))
    embedder = embedder_of(index, model)
    return embedder.threshold, embedder.cut


def _threshold(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 4:
        raise argparse.ArgumentTypeError(f"a squared distance of unit vectors is above 0 and at most 4, got {text!r}")
    return value
