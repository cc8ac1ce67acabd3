"""linattn lab faces cluster: which pictures show the same people?"""

import argparse
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from .._commandline import command, describe, progress, require, write_json
from .sources import add_gallery, load_gallery

HELP = """
Puts pictures that show one person together, without being told who is who: agglomerative clustering, which stops where
the mean squared distance of two clusters is above the threshold; a lower one makes more and purer clusters. Writes a
contact sheet and a page. Where pictures lie in folders by person, it says how well the clusters match them, and marks the
pictures that lie with other people.

examples:
  linattn lab faces cluster                         # the pictures of faces-index
  linattn lab faces cluster holiday --model faces-model
  linattn lab faces cluster holiday --into sorted   # copies: sorted/001/..., ready to be named and trained on
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_gallery(parser, "pictures")
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, default=Path("clusters.png"), help="default %(default)s"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, default=Path("clusters.html"), help="default %(default)s")
    parser.add_argument(
        "--into", metavar="FOLDER", type=Path, help="copy the pictures of clusters into a folder for each"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the clusters for machines")


@command
def run(args: argparse.Namespace) -> int:
    require("PIL", "safetensors", "sklearn", "scipy", "matplotlib")
    from .cluster import agreement, cluster, typical_first
    from .pages import note, section, write_page
    from .sheet import Group, draw_sheet
    from .words import counted

    if args.into and args.into.exists() and (not args.into.is_dir() or any(args.into.iterdir())):
        raise ValueError(f"{args.into} is there and not empty: name a new folder by --into.")
    gallery = load_gallery(args)
    if not gallery.faces:
        raise ValueError(f"{gallery.title} holds no picture that can be read.")
    labels = cluster(gallery.embeddings, gallery.threshold)
    members = [[gallery.faces[i] for i in rows] for rows in typical_first(gallery.embeddings, labels)]
    many = [group for group in members if len(group) > 1]
    alone = [group[0] for group in members if len(group) == 1]
    summary = (
        f"{counted(len(gallery.faces), 'picture')}: {counted(len(many), 'cluster')}, {len(alone)} alone, "
        f"at threshold {gallery.threshold:.3f}"
    )
    print(summary)
    figures: dict[str, Any] = {
        "threshold": gallery.threshold,
        "clusters": [[f.file for f in group] for group in members],
    }
    lines = [summary]
    known = [i for i, face in enumerate(gallery.faces) if face.person is not None]
    if known:
        people = [gallery.faces[i].person for i in known]
        match = agreement(labels[known], people)
        lines.append(
            f"against {len(set(people))} people: of pairs put together {100 * match.precision:.1f} % are one person, "
            f"of pairs of one person {100 * match.recall:.1f} % are together (F1 {match.f1:.3f})"
        )
        print(lines[-1])
        figures |= {"precision": match.precision, "recall": match.recall, "f1": match.f1, "people": len(set(people))}
    groups = [_group(f"{number}: ", group) for number, group in enumerate(many, 1)]
    if alone:
        groups.append(Group(f"alone: {len(alone)}", [_shown(face, None) for face in alone]))
    draw_sheet(lines[0], groups, args.picture)
    print(f"wrote {args.picture}")
    write_page(
        args.html,
        "Clusters of faces",
        [*map(note, lines), *map(section, progress(groups, desc="page", unit="cluster"))],
    )
    print(f"wrote {args.html}")
    if args.into:
        print(f"copied {counted(_copy(many, args.into), 'picture')} into {args.into}; those alone stay where they are")
    if args.json:
        write_json(args.json, figures)
        print(f"wrote {args.json}")
    return 0


def _group(start: str, faces: list[Any]) -> Any:
    """A cluster under the names in it; pictures of anyone but the most frequent are marked."""
    from .sheet import Group

    names = Counter(face.person for face in faces if face.person is not None).most_common()
    said = ", ".join(f"{name} x {count}" for name, count in names[:4]) + (", ..." if len(names) > 4 else "")
    title = f"{start}{len(faces)} pictures" + (f" ({said})" if said else "")
    return Group(title, [_shown(face, names[0][0] if names else None) for face in faces])


def _shown(face: Any, person: str | None) -> Any:
    from .sheet import Shown

    wrong = person is not None and face.person not in (None, person)
    return Shown(face.file, face.person or Path(face.file).name, "wrong" if wrong else "")


def _copy(members: list[list[Any]], folder: Path) -> int:
    """Copies of the pictures of clusters in 001/, 002/, ..."""
    count = 0
    for number, group in enumerate(members, 1):
        target = folder / f"{number:03d}"
        target.mkdir(parents=True, exist_ok=True)
        for face in group:
            source = Path(face.file)
            if not source.is_file():
                continue
            free = target / source.name
            while free.exists():  # pictures of different folders may share a name
                free = free.with_name(f"{source.parent.name}-{free.name}")
            shutil.copy2(source, free)
            count += 1
    return count
