"""The kinds of pairs, how a document of each is marked for the model, and how their texts are gathered."""

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data import Package, debian_descriptions, debian_packages
from ..data.apt import fetch_apt_lists
from ..data.manuals import fetch_manuals, read_manuals
from ..data.projects import Progress, fetch_wheels, find_wheels, no_progress, normal_name
from .manual_pages import page_pair
from .manual_sources import manual_packages
from .pairs import Pair
from .splits import split_by_source, unique
from .wheel_texts import wheel_docstrings, wheel_readme

PROJECTS = Path(__file__).parent / "projects.txt"
LARGEST_SOURCE = 300  # pairs of one source and kind in training, so that no project decides the style
# README files that people try first: none of these projects gives a README or a docstring to training or test. The first
# ten are in Debian, with descriptions that may be among the packages; the others are not.
HELD_OUT = (
    *("numpy", "requests", "flask", "pandas", "black", "rich", "httpx", "click", "pytest", "fastapi"),
    *("transformers", "openai", "streamlit", "keras", "prefect", "ruff", "manim", "shap", "tortoise-orm", "beanie"),
)
# What a model reads before a document, so that it knows which kind of line is asked for.
MARKS = {"packages": "", "manuals": "manual page:\n\n", "docstrings": "docstring:\n\n", "readmes": "readme:\n\n"}
KINDS = tuple(MARKS)


def marked(document: str, kind: str) -> str:
    """A document as the model reads it; packages, and texts of no kind, have no mark."""
    return MARKS.get(kind, "") + document


def projects() -> list[str]:
    """Names of Python projects whose wheels are small and hold Python alone."""
    return PROJECTS.read_text(encoding="utf-8").split()


def gather(
    kinds: Sequence[str],
    fetched: Path,
    sizes: Mapping[str, tuple[int, int]],
    seed: int = 0,
    lists: Path | None = None,
    progress: Progress = no_progress,
) -> tuple[dict[str, list[Pair]], dict[str, dict[str, list[Pair]]]]:
    """All different pairs of each kind, and their splits.

    A source has the same side in every kind: that of its package descriptions, where it has any. Whether a Python
    project is in Debian is told by its name.

    Args:
        fetched: the folder that downloads are kept in.
        sizes: pairs to validate and to test on, by kind.
        lists: a folder of apt lists instead of fresh ones.
    """
    if lists is None:
        with tempfile.TemporaryDirectory(prefix="linattn-apt-") as folder:
            fetch_apt_lists(Path(folder), languages="en")
            return gather(kinds, fetched, sizes, seed, Path(folder), progress)
    sides: dict[str, str] = {}
    described = unique(debian_pairs(lists))
    pairs = {"packages": described}
    splits = {"packages": split_by_source(described, *sizes["packages"], seed, sides)}
    index = debian_packages(lists)
    if "manuals" in kinds:
        pairs["manuals"] = unique(manual_pairs(manual_packages(index, sides), index, fetched / "manuals", progress))
    if "docstrings" in kinds or "readmes" in kinds:
        found = wheel_pairs(projects(), index, fetched / "wheels", progress)
        pairs |= {kind: unique(found[kind]) for kind in ("docstrings", "readmes") if kind in kinds}
    for kind in sorted(pairs, key=lambda kind: len(pairs[kind])):  # the rarest has the first choice of new sources
        if kind != "packages":
            few = one_first_paragraph(at_most(pairs[kind], LARGEST_SOURCE))
            splits[kind] = split_by_source(few, *sizes[kind], seed, sides)
    return {kind: pairs[kind] for kind in kinds}, {kind: splits[kind] for kind in kinds}


def debian_pairs(lists: Path | None = None) -> list[Pair]:
    """Debian's descriptions as pairs."""
    return [
        Pair(found.text, found.synopsis, found.source, found.package, "packages")
        for found in debian_descriptions(lists)
    ]


def manual_pairs(
    packages: Sequence[str], index: Mapping[str, Package], folder: Path, progress: Progress = no_progress
) -> list[Pair]:
    """The manual pages of Debian packages, fetched if they are not in `folder`."""
    fetch_manuals(packages, folder, progress)
    found = []
    for package, pages in read_manuals(packages, folder).items():
        for page in pages.values():
            pair = page_pair(page)
            if pair is not None:
                found.append(Pair(*pair, index[package].source, package, "manuals"))
    return found


def wheel_pairs(
    names: Sequence[str], index: Mapping[str, Package], folder: Path, progress: Progress = no_progress
) -> dict[str, list[Pair]]:
    """Docstrings and READMEs of Python projects, their wheels fetched if they are not in `folder`."""
    names = [name for name in map(normal_name, names) if name not in HELD_OUT]
    fetch_wheels(names, folder, progress)
    wheels = find_wheels(folder)
    found: dict[str, list[Pair]] = {"docstrings": [], "readmes": []}
    sources = {package.source for package in index.values()}
    for name in progress([name for name in names if name in wheels], desc="reading wheels"):
        source = debian_source(name, index, sources)
        readme = wheel_readme(wheels[name])
        if readme is not None:
            found["readmes"].append(Pair(*readme, source, name, "readmes"))
        found["docstrings"] += [Pair(*pair, source, name, "docstrings") for pair in wheel_docstrings(wheels[name])]
    return found


def debian_source(project: str, index: Mapping[str, Package], sources: set[str]) -> str:
    """The source package that a Python project is in Debian, or its own name."""
    for package in (f"python3-{project}", f"python3-{project.removeprefix('python-')}", project):
        if package in index:
            return index[package].source
    return next((name for name in (project, f"python-{project}") if name in sources), project)


def at_most(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """The first pairs of each source, evenly over all of them where there are too many."""
    groups = defaultdict(list)
    for pair in pairs:
        groups[pair.source].append(pair)
    return [pair for group in groups.values() for pair in group[:: -(-len(group) // count)]]


def one_first_paragraph(pairs: Sequence[Pair]) -> list[Pair]:
    """Of pairs of one source whose documents begin with the same paragraph, the first."""
    found: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        found.setdefault((pair.source, pair.document.partition("\n\n")[0]), pair)
    return list(found.values())
