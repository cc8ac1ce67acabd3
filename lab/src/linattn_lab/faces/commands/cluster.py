"""linattn lab faces cluster: groups images by person."""

import argparse
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...commandline import add_output, describe, progress, require, write_json
from .gallery import add_gallery, load_gallery

if TYPE_CHECKING:
    from ..index import Face
    from ..reports.contact_sheet import Group, Shown

HELP = """
Groups images by person without labels, and without knowing how many people there are: agglomerative clustering with
average linkage, which stops when no two clusters have a mean squared distance up to the model's cut. `train` has chosen
the cut on people that it held out, for the best pairwise F1; it is not the threshold of verify. A lower --threshold
gives more and purer clusters. Writes a contact sheet and a page. Where images lie in folders by person, it says how
well the clusters match them, and marks the images that lie with other people.

examples:
  linattn lab faces cluster                         # the pictures of faces-index
  linattn lab faces cluster holiday --model faces-model
  linattn lab faces cluster holiday --into sorted   # copies: sorted/001/..., ready to be named and trained on
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_gallery(parser, "pictures", "mean squared distance of two clusters up to which they merge")
    add_output(
        parser,
        "--picture",
        "the contact sheet",
        suffixes=(".png", ".jpg", ".jpeg", ".webp"),
        default=Path("clusters.png"),
    )
    add_output(parser, "--html", "the page", default=Path("clusters.html"))
    parser.add_argument(
        "--into", metavar="FOLDER", type=Path, help="copy the pictures of clusters into a folder for each"
    )
    add_output(parser, "--json", "write the clusters for machines")


def run(args: argparse.Namespace) -> int:
    require("PIL", "safetensors", "sklearn", "scipy", "matplotlib")
    from ..reports.contact_sheet import Group, draw_sheet
    from ..reports.image_page import write_image_page
    from ..text import counted
    from ..verification.clustering import agreement, cluster, typical_first

    if args.into and args.into.exists() and (not args.into.is_dir() or any(args.into.iterdir())):
        raise ValueError(f"{args.into} is there and not empty: name a new folder by --into.")
    gallery = load_gallery(args)
    if not gallery.faces:
        raise ValueError(f"{gallery.title} holds no picture that can be read.")
    labels = cluster(gallery.embeddings, gallery.cut)
    members = [[gallery.faces[i] for i in rows] for rows in typical_first(gallery.embeddings, labels)]
    many = [group for group in members if len(group) > 1]
    alone = [group[0] for group in members if len(group) == 1]
    summary = (
        f"{counted(len(gallery.faces), 'picture')}: {counted(len(many), 'cluster')}, {len(alone)} alone, "
        f"merged up to {gallery.cut:.3f}"
    )
    print(summary)
    figures: dict[str, Any] = {
        "cut": gallery.cut,
        "clusters": [[f.file for f in group] for group in members],
    }
    lines = [summary]
    known = [i for i, face in enumerate(gallery.faces) if face.person is not None]
    if known:
        people = [gallery.faces[i].person for i in known]
        match = agreement(labels[known], people)
        lines.append(
            f"against {len(set(people))} people: of pairs put together {100 * match.precision:.1f} % are one person, "
            f"of pairs of one person {100 * match.recall:.1f} % are together (pairwise F1 {match.f1:.3f})"
        )
        print(lines[-1])
        figures |= {"precision": match.precision, "recall": match.recall, "f1": match.f1, "people": len(set(people))}
    groups = [_group(f"{number}: ", group) for number, group in enumerate(many, 1)]
    if alone:
        groups.append(Group(f"alone: {len(alone)}", [_shown(face, None) for face in alone]))
    draw_sheet(lines[0], groups, args.picture)
    print(f"wrote {args.picture}")
    shown = progress(groups, desc="page", unit="cluster")
    write_image_page(args.html, "Clusters of faces", lines, groups=shown)
    print(f"wrote {args.html}")
    if args.into:
        print(f"copied {counted(_copy(many, args.into), 'picture')} into {args.into}; those alone stay where they are")
    if args.json:
        write_json(args.json, figures)
        print(f"wrote {args.json}")
    return 0


def _group(start: str, faces: "list[Face]") -> "Group":
    """A cluster under the names in it; images of anyone but the most frequent are marked."""
    from ..reports.contact_sheet import Group

    names = Counter(face.person for face in faces if face.person is not None).most_common()
    said = ", ".join(f"{name} x {count}" for name, count in names[:4]) + (", ..." if len(names) > 4 else "")
    title = f"{start}{len(faces)} pictures" + (f" ({said})" if said else "")
    return Group(title, [_shown(face, names[0][0] if names else None) for face in faces])


def _shown(face: "Face", person: str | None) -> "Shown":
    from ..reports.contact_sheet import Shown

    wrong = person is not None and face.person not in (None, person)
    return Shown(face.file, face.person or Path(face.file).name, "wrong" if wrong else "")


def _copy(members: "list[list[Face]]", folder: Path) -> int:
    """Copies of the images of clusters in 001/, 002/, ..."""
    count = 0
    for number, group in enumerate(members, 1):
        target = folder / f"{number:03d}"
        target.mkdir(parents=True, exist_ok=True)
        for face in group:
            source = Path(face.file)
            if not source.is_file():
                continue
            free = target / source.name
            while free.exists():  # images of different folders may share a name
                free = free.with_name(f"{source.parent.name}-{free.name}")
            shutil.copy2(source, free)
            count += 1
    return count
