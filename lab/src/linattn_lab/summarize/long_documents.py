"""Long documents out of short ones: what a document is about still stands at its beginning."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from .pairs import Pair

Example = tuple[list[int], list[int]]  # the document's tokens and the summary's


def lengthened(
    examples: Sequence[Example], share: float, longest: int, between: Sequence[int], seed: int = 0
) -> list[Example]:
    """The examples, a `share` of them followed by the documents of others, their summaries as they were.

    How long such a document becomes is drawn evenly over the orders of magnitude, up to `longest` tokens; `between` are
    the tokens that part paragraphs. A model that has read both kinds does not lose its subject in a long text.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of long documents must be 0 to 1, got {share}.")
    draw = random.Random(seed)
    found = []
    for document, summary in examples:
        if draw.random() < share and 0 < len(document) < longest:
            document = list(document)
            length = round(math.exp(draw.uniform(math.log(len(document)), math.log(longest))))
            while len(document) < length:
                document += [*between, *draw.choice(examples)[0]]
            document = document[:length]
        found.append((document, summary))
    return found


def lengthened_pairs(pairs: Sequence[Pair], words: int, seed: int = 0) -> list[Pair]:
    """The pairs, each document followed by those of other pairs until it has `words` words; the summaries stay."""
    draw = random.Random(seed)
    found = []
    for pair in pairs:
        texts, count = [pair.document], len(pair.document.split())
        while count < words:
            texts.append(draw.choice(pairs).document)
            count += len(texts[-1].split())
        found.append(replace(pair, document="\n\n".join(texts)))
    return found
