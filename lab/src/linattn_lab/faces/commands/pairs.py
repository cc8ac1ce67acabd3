"""linattn lab faces pairs: the pairs of images that decide where the threshold should be."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...commandline import add_output, describe, real, require, table, whole, write_json
from .gallery import MODEL, add_gallery, load_embedder, load_gallery

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..index import Face
    from ..verification.threshold_pairs import Pairs

HELP = """
Looks at every pair of images in folders by person, and writes a page of those nearest the threshold, on both sides:
one person accepted and missed, different people told apart and mistaken. The worst errors come last; often they are
images in the wrong folder. Also: which threshold gives which share of false accepts (FAR) and of right ones (VAL).

The images should be of people that the model was not trained on; those that it knows look easier than they are.

examples:
  linattn lab faces pairs photos                    # writes pairs.html
  linattn lab faces pairs photos --far 0.001        # pairs nearest the threshold that mistakes one pair in 1000
  linattn lab faces pairs photos --far 0.001 --keep # and make it the model's threshold, which verify explains
"""
RATES = (0.1, 0.01, 0.001)
TITLES = {
    "accepted": ("One person, barely accepted", True),
    "missed": ("One person, barely missed", False),
    "rejected": ("Different people, barely told apart", True),
    "mistaken": ("Different people, barely mistaken for one", False),
    "worst missed": ("One person, farthest apart", False),
    "worst mistaken": ("Different people, nearest together", False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_gallery(parser, "person/picture files")
    parser.add_argument(
        "--far", type=real(above=0, most=1), help="look around the threshold with this share of false accepts"
    )
    parser.add_argument("--show", type=whole(), default=12, help="pairs of each kind (default %(default)s)")
    parser.add_argument("--keep", action="store_true", help="write threshold and distances into the model, for verify")
    add_output(parser, "--html", "the page", default=Path("pairs.html"))
    add_output(parser, "--json", "write the figures for machines")


def run(args: argparse.Namespace) -> int:
    if args.far == 1:
        raise ValueError("--far must be below 1: at 1 every pair is accepted.")
    if args.far is not None and args.threshold is not None:
        raise ValueError("--far chooses the threshold: leave --threshold out.")
    require("PIL", "safetensors", "sklearn", "matplotlib")
    from ..verification.threshold_pairs import find_pairs

    gallery = load_gallery(args)
    people = [face.person for face in gallery.faces]
    found = find_pairs(gallery.embeddings, people, gallery.threshold, args.show)
    if args.far is not None:
        found = find_pairs(gallery.embeddings, people, found.threshold_for(args.far), args.show)
    pictures = sum(person is not None for person in people)
    summary = (
        f"{pictures} pictures of {len(set(people) - {None})} people: {len(found.same)} pairs of one person, "
        f"{len(found.different)} of different people"
    )
    thresholds = {"here": found.threshold, **{f"FAR {far:g}": found.threshold_for(far) for far in RATES}}
    rows = [["", "threshold", "one person accepted (VAL)", "different people mistaken (FAR)"]]
    for name, threshold in thresholds.items():
        val, far = found.accepted(threshold), found.mistaken(threshold)
        rows.append([name, f"{threshold:.3f}", f"{val:.4f}", f"{far:.5f}"])
    print(f"{summary}\n\n{table(rows, ' rrr')}\n")
    _page(args.html, summary, rows, found, gallery.faces)
    print(f"wrote {args.html}")
    if args.keep:
        _keep(args, found)
    if args.json:
        figures = {name: [found.accepted(t), found.mistaken(t), t] for name, t in thresholds.items()}
        pairs = {"same": len(found.same), "different": len(found.different)}
        write_json(args.json, {"pairs": pairs, "val_far_threshold": figures})
        print(f"wrote {args.json}")
    return 0


def _keep(args: argparse.Namespace, found: "Pairs") -> None:
    from ..verification.confidence import calibrate
    from .gallery import embedder_of, open_index

    if args.photos is None:
        index = open_index(args.index)
        folder, embedder = args.model or Path(index.settings["model"]), embedder_of(index, args.model)
    else:
        folder = args.model or MODEL
        embedder = load_embedder(folder)
    embedder.threshold = found.threshold
    for name in ("threshold_95", "far_95", "val", "people_to_choose_by", "pairs_to_choose_by"):
        embedder.about.pop(name, None)  # of the threshold before
    embedder.about["far"] = found.mistaken()
    embedder.about["calibration"] = calibrate(found.same, found.different)
    embedder.save(folder)
    print(f"{folder} now has threshold {found.threshold:.3f} and knows these distances")


def _page(path: Path, summary: str, rows: list[list[str]], found: "Pairs", faces: "list[Face]") -> None:
    from linattn.pages import plot_address

    from ..reports.contact_sheet import Shown
    from ..reports.image_page import PairKind, write_image_page

    def shown(place: int) -> Shown:
        face = faces[place]
        return Shown(face.file, f"{face.person}/{Path(face.file).name}")

    kinds = []
    for kind, (title, good) in TITLES.items():
        pairs, total = found.shown[kind], found.count(kind)
        title = f"{title}: {len(pairs)} of {total}" if pairs else f"{title}: none"
        kinds.append(PairKind(title, good, [(shown(p.first), shown(p.second), f"{p.distance:.3f}") for p in pairs]))
    title, histogram = f"Pairs of faces around {found.threshold:.3f}", plot_address(_histogram(found))
    write_image_page(path, title, [summary], rows=rows, histogram=histogram, pairs=kinds)


def _histogram(found: "Pairs") -> "Figure":
    import numpy as np

    from ...plotting import new_figure

    figure = new_figure(8, 2.8)
    axes = figure.subplots()
    bins = np.linspace(0, max(found.same[-1], found.different[-1]), 80).tolist()
    for distances, name, colour in (
        (found.same, "one person", "#2b8a3e"),
        (found.different, "different people", "#868e96"),
    ):
        axes.hist(distances, bins, density=True, alpha=0.6, label=name, color=colour)
    axes.axvline(found.threshold, color="#d9480f", label=f"threshold {found.threshold:.3f}")
    axes.set(xlabel="squared distance", ylabel="density", yticks=[])
    axes.legend(frameon=False)
    return figure
