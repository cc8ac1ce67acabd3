"""Which Debian packages the manual pages are taken from: some that are rich in them, and many small ones."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ..data import Package

NAMES = Path(__file__).parent / "manual_packages.txt"
SECTIONS = frozenset(
    (
        "admin",
        "comm",
        "database",
        "devel",
        "editors",
        "electronics",
        "graphics",
        "hamradio",
        "mail",
        "math",
        "misc",
        "net",
        "otherosfs",
        "perl",
        "science",
        "shells",
        "sound",
        "text",
        "utils",
        "vcs",
        "video",
        "web",
        "x11",
    )
)
LARGEST = 250_000  # bytes of a small package
SMALL = 1000  # of them for training


def rich_packages() -> list[str]:
    """Names of packages with many manual pages."""
    return NAMES.read_text(encoding="utf-8").split()


def manual_packages(index: Mapping[str, Package], sides: Mapping[str, str]) -> list[str]:
    """Names of packages: the rich ones, and small ones of SECTIONS in the order of a digest of their names.

    Of the small ones all that are not for training, and SMALL that are: few sources are on the other sides.

    Args:
        index: all packages by name.
        sides: of source packages: train, validation or test.
    """
    small = [name for name, package in index.items() if package.section in SECTIONS and package.size <= LARGEST]
    small.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    learnt = [name for name in small if sides.get(index[name].source) == "train"]
    asked = [name for name in small if sides.get(index[name].source) in ("validation", "test")]
    return list(dict.fromkeys([name for name in rich_packages() if name in index] + asked + learnt[:SMALL]))
