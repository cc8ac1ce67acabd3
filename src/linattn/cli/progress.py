"""A progress bar on standard error, shown in terminals only, where tqdm is installed (the extra `hf` has it)."""

import sys
from collections.abc import Iterator, Sequence


def progress(labels: Sequence[str]) -> Iterator[str]:
    """Yields the labels one by one and shows how far they are and how long the rest will take."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # the core does without
        yield from labels
        return
    with tqdm(total=len(labels), file=sys.stderr, disable=None, leave=False) as bar:
        for label in labels:
            bar.set_postfix_str(label)
            yield label
            bar.update()
