"""Kinds of pairs in chosen shares: what a model learns from when one kind has far more pairs than another."""

import argparse
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from .kinds import KINDS


def share(text: str) -> tuple[str, float]:
    """A flag's value such as `readmes=0.25`."""
    kind, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if kind not in KINDS or not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected KIND=SHARE with a kind of {', '.join(KINDS)}, got {text!r}")
    return kind, value


def mixture(kinds: Sequence[str], shares: Mapping[str, float], seed: int = 0) -> list[int]:
    """Places of examples, as many as there are in all, so that each kind has its share of them.

    Examples of a small kind come more often than once, all equally often up to one; of a large kind some do not come.

    Args:
        kinds: of every example.
        shares: by kind; their sum is taken for 1. A kind without a share is left out.
    """
    places = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    missing = [kind for kind, value in shares.items() if value > 0 and not places[kind]]
    total = sum(shares.values())
    if missing or total <= 0:
        raise ValueError(f"there are no pairs of {', '.join(missing)}." if missing else "all shares are 0.")
    draw = random.Random(seed)
    found: list[int] = []
    for kind, value in shares.items():
        left = round(value / total * len(kinds))
        while left > 0:
            part = draw.sample(places[kind], min(left, len(places[kind])))
            found += part
            left -= len(part)
    draw.shuffle(found)
    return found
