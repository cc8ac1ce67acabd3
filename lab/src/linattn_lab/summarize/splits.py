"""Train, validation and test out of pairs whose siblings share text, and what there is to say about them."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from .pairs import Pair

LARGEST_FAMILY = 10  # pairs of one source in validation or test, so that no family of packages decides the figures


def unique(pairs: Iterable[Pair]) -> list[Pair]:
    """Each pair of texts once, the first of its kind; pairs without a document or a summary are left out."""
    found: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        if pair.document.strip() and pair.summary.strip():
            found.setdefault((pair.document, pair.summary), pair)
    return list(found.values())


def first_paragraph(document: str) -> str:
    return document.partition("\n\n")[0]


def split_by_source(
    pairs: list[Pair], validation: int, test: int, seed: int = 0, sides: dict[str, str] | None = None
) -> dict[str, list[Pair]]:
    """Splits so that no source is on two sides, and no first paragraph of validation or test is in any other source.

    Sources stand in the order of a digest of seed and name, test first, then validation, then train: when the index
    gains and loses packages, pairs move between neighbours only, and what was trained on stays out of the test.

    sides: of sources that have one already, since pairs of another kind were split; it is kept, and new ones are added.
    """
    sides = {} if sides is None else sides
    groups = defaultdict(list)
    owners = defaultdict(set)
    for number, pair in enumerate(pairs):
        source = pair.source or f"\n{number}"  # without a name, each pair is a source of its own
        groups[source].append(pair)
        owners[first_paragraph(pair.document)].add(source)
    found: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    asked = {"test": test, "validation": validation}

    def order(source: str) -> tuple[bool, bytes]:
        return source not in sides, hashlib.sha256(f"{seed}:{source}".encode()).digest()

    for source in sorted(groups, key=order):
        free = next((name for name in asked if len(found[name]) < asked[name]), "train")
        side = sides.setdefault(source, free)
        if side == "train":
            found["train"] += groups[source]
        else:
            own = [pair for pair in groups[source] if len(owners[first_paragraph(pair.document)]) == 1][:LARGEST_FAMILY]
            found[side] += own[: asked[side] - len(found[side])]
    for name, count in (("train", 1), ("validation", validation), ("test", test)):
        if len(found[name]) < count:
            raise ValueError(
                f"{len(pairs)} pairs leave {len(found[name])} for {name}, not {count}: give more pairs, or lower "
                "--validation and --test."
            )
    return found


def statistics(pairs: list[Pair]) -> dict[str, float]:
    """Pairs, sources, median words, and the share of summary bigrams that are not in the document."""
    new = total = 0
    for pair in pairs:
        summary = _bigrams(pair.summary)
        new += len(summary - _bigrams(pair.document))
        total += len(summary)
    return {
        "pairs": len(pairs),
        "sources": len({pair.source or number for number, pair in enumerate(pairs)}),
        "document_words": median(len(pair.document.split()) for pair in pairs),
        "summary_words": median(len(pair.summary.split()) for pair in pairs),
        "new_bigrams": new / max(1, total),
    }


def _bigrams(text: str) -> set[tuple[str, str]]:
    words = re.findall("[a-z0-9]+", text.lower())
    return set(pairwise(words))
