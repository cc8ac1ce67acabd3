"""linattn lab summarize prepare: pairs of document and summary, split and described, and their vocabulary."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from ...commandline import add_common, describe, require, table, whole, write_json
from ...data import debian_descriptions
from ..pairs import SPLITS, Pair, data_folder, read_pairs, write_pairs
from ..splits import split_by_source, statistics, unique

TOKENS = "tokens.json"
HELP = """
Makes the pairs that the summarizer learns from: train.jsonl, validation.jsonl, test.jsonl and tokens.json in a folder.

By default they are Debian's package descriptions, long text -> one-line synopsis, out of the index that apt-get fetches
(16 MB, into a temporary folder: the machine's own package lists stay as they are, and no rights are needed). Packages
built from one source share text, so the split is by source package, and a description whose first paragraph occurs in
another source is in neither validation nor test.

With files of your own: .jsonl with {"document": ..., "summary": ...} on each line, or .csv with these two columns; a
third, "source", keeps siblings on one side of the split.

examples:
  linattn lab summarize prepare
  linattn lab summarize prepare --out pairs --seed 1
  linattn lab summarize prepare articles.jsonl --out articles --validation 200 --test 200
  linattn lab summarize prepare --lists FOLDER     # apt lists that are already here
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .csv (default: Debian's pairs)")
    parser.add_argument("--out", type=Path, default=data_folder(), help="folder to write to (default %(default)s)")
    parser.add_argument("--lists", type=Path, metavar="FOLDER", help="take apt lists from here, and fetch nothing")
    parser.add_argument("--validation", type=whole(), default=1500, help="pairs to validate on (default %(default)s)")
    parser.add_argument("--test", type=whole(), default=1500, help="pairs to test on (default %(default)s)")
    parser.add_argument(
        "--vocabulary", type=whole(256), default=8192, help="size of the vocabulary (default %(default)s)"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    if args.files and args.lists:
        raise ValueError("give files of pairs or --lists, not both.")
    require("tokenizers")
    from ..tokenizer import Tokens

    given = [pair for path in args.files for pair in read_pairs(path)] if args.files else debian_pairs(args.lists)
    pairs = unique(given)
    splits = split_by_source(pairs, args.validation, args.test, args.seed)
    tokens = Tokens.train(texts(splits["train"]), args.vocabulary)
    for name in SPLITS:
        write_pairs(args.out / f"{name}.jsonl", splits[name])
    tokens.save(args.out / TOKENS)

    figures = {"all": statistics(pairs)} | {name: statistics(splits[name]) for name in SPLITS}
    rows = [["", "pairs", "sources", "words in a document", "in a summary", "new bigrams"]]
    for name, found in figures.items():
        rows.append(
            [
                name,
                f"{found['pairs']}",
                f"{found['sources']}",
                f"{found['document_words']:g}",
                f"{found['summary_words']:g}",
                f"{100 * found['new_bigrams']:.0f} %",
            ]
        )
    left = len(pairs) - sum(len(part) for part in splits.values())
    print(f"{len(given)} pairs read, {len(pairs)} different ones. Words: medians. New bigrams: share of the summaries'")
    print("pairs of words that their documents do not have.\n")
    print(table(rows, " rrrrr"))
    print(f"\n{left} siblings and repetitions were left out of validation and test; vocabulary: {tokens.size} tokens")
    print(f"wrote {args.out}")
    if args.json:
        write_json(args.json, figures)
        print(f"wrote {args.json}")
    return 0


def debian_pairs(lists: Path | None = None) -> list[Pair]:
    """Debian's descriptions as pairs."""
    return [Pair(found.text, found.synopsis, found.source, found.package) for found in debian_descriptions(lists)]


def texts(pairs: Iterable[Pair]) -> Iterable[str]:
    """What a vocabulary is learned from."""
    for pair in pairs:
        yield pair.document
        yield pair.summary
