"""linattn lab summarize prepare: pairs of document and summary, split and described, and their vocabulary."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...commandline import add_common, describe, progress, require, table, whole, write_json
from ..kinds import KINDS, gather
from ..pairs import SPLITS, Pair, data_folder, read_pairs, write_pairs
from ..splits import split_by_source, statistics, unique

if TYPE_CHECKING:
    from ..tokenizer import Tokens

TOKENS = "tokens.json"
# Pairs to validate and to test on, where the command does not say: small kinds give fewer.
SIZES = {"packages": (1500, 1500), "manuals": (300, 500), "docstrings": (300, 500), "readmes": (200, 300)}
HELP = """
Makes the pairs that the summarizer learns from: train.jsonl, validation.jsonl, test.jsonl and tokens.json in a folder.

By default they are Debian's package descriptions, long text -> one-line synopsis, out of the index that apt-get fetches
(16 MB, into a temporary folder: the machine's own package lists stay as they are, and no rights are needed). Packages
built from one source share text, so the split is by source package, and a description whose first paragraph occurs in
another source is in neither validation nor test.

--kinds names others too. Each is downloaded with apt-get or pip as the machine has them set up; nothing is installed,
built or run, and a run that was stopped goes on with what it has:
  packages    Debian's descriptions -> synopsis
  manuals     manual pages out of Debian packages, DESCRIPTION -> what the NAME line says after its dash
  docstrings  of Python wheels, the rest -> the first line
  readmes     of Python wheels, README -> Summary of their metadata
A source has the same side of the split in every kind.

With files of your own: .jsonl with {"document": ..., "summary": ...} on each line, or .csv with these two columns; a
third, "source", keeps siblings on one side of the split.

examples:
  linattn lab summarize prepare
  linattn lab summarize prepare --out pairs --seed 1
  linattn lab summarize prepare --kinds packages manuals docstrings readmes --out mixture
  linattn lab summarize prepare --kinds packages readmes --out mixture --tokens first/model.safetensors
  linattn lab summarize prepare articles.jsonl --out articles --validation 200 --test 200
  linattn lab summarize prepare --lists FOLDER     # apt lists that are already here
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=".jsonl or .csv (default: Debian's pairs)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["packages"], help="of pairs (default packages)")
    parser.add_argument("--out", type=Path, default=data_folder(), help="folder to write to (default %(default)s)")
    parser.add_argument("--lists", type=Path, metavar="FOLDER", help="take apt lists from here, and fetch none")
    parser.add_argument(
        "--fetched",
        type=Path,
        metavar="FOLDER",
        default=data_folder() / "fetched",
        help="keep manual pages and wheels here (default %(default)s)",
    )
    sizes = "default: 1500 of packages and files, less of other kinds"
    parser.add_argument("--validation", type=whole(), help=f"pairs of each kind to validate on ({sizes})")
    parser.add_argument("--test", type=whole(), help=f"pairs of each kind to test on ({sizes})")
    parser.add_argument(
        "--vocabulary", type=whole(256), default=8192, help="size of the vocabulary (default %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help="keep the vocabulary of this model.safetensors or tokens.json"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    if args.files and args.lists:
        raise ValueError("give files of pairs or --lists, not both.")
    if args.files and args.kinds != ["packages"]:
        raise ValueError("give files of pairs or --kinds, not both.")
    require("tokenizers")
    sizes = {kind: (args.validation or size[0], args.test or size[1]) for kind, size in SIZES.items()}
    if args.files:
        given = [pair for path in args.files for pair in read_pairs(path)]
        pairs = {"all": unique(given)}
        parts = {"all": split_by_source(pairs["all"], *sizes["packages"], args.seed)}
    else:
        pairs, parts = gather(args.kinds, args.fetched, sizes, args.seed, args.lists, progress)
    splits = {name: [pair for kind in parts for pair in parts[kind][name]] for name in SPLITS}
    tokens = vocabulary(splits["train"], args.vocabulary, args.tokens)
    for name in SPLITS:
        write_pairs(args.out / f"{name}.jsonl", splits[name])
    tokens.save(args.out / TOKENS)

    figures = {kind: {"all": statistics(pairs[kind])} for kind in parts}
    for kind, part in parts.items():
        figures[kind] |= {name: statistics(part[name]) for name in SPLITS}
    print("Words: medians. New bigrams: share of the summaries' pairs of words that their documents do not have.\n")
    print(statistics_table(figures))
    for kind, part in parts.items():
        left = len(pairs[kind]) - sum(len(some) for some in part.values())
        print(f"\n{kind}: {left} siblings and repetitions were left out", end="")
    print(f"\nvocabulary: {tokens.size} tokens\nwrote {args.out}")
    if args.json:
        write_json(args.json, figures if len(figures) > 1 else next(iter(figures.values())))
        print(f"wrote {args.json}")
    return 0


def statistics_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """What `statistics` says of each kind and split, in columns."""
    rows = [["", "", "pairs", "sources", "words in a document", "in a summary", "new bigrams"]]
    for kind, splits in figures.items():
        for name, found in splits.items():
            words = (f"{found[key]:g}" for key in ("pairs", "sources", "document_words", "summary_words"))
            rows.append([kind, name, *words, f"{100 * found['new_bigrams']:.0f} %"])
    return table(rows, "  rrrrr")


def vocabulary(train: Sequence[Pair], size: int, given: Path | None) -> "Tokens":
    """Learned from the training pairs, or the one of a file."""
    from ..summarizer import Summarizer
    from ..tokenizer import Tokens

    if given is None:
        return Tokens.train(texts(train), size)
    return Tokens.load(given) if given.suffix == ".json" else Summarizer.load(given).tokens


def texts(pairs: Iterable[Pair]) -> Iterable[str]:
    """What a vocabulary is learned from."""
    for pair in pairs:
        yield pair.document
        yield pair.summary
