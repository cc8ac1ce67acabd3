"""linattn lab summarize evaluate: ROUGE of a model beside what simple rules reach."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...commandline import add_common, add_output, describe, progress, require, whole, write_file, write_json
from ...figures.figure import Figure, add_figures, save_figures
from ..kinds import KINDS
from ..long_documents import lengthened_pairs
from ..pairs import Pair, data_folder, read_pairs, read_split

if TYPE_CHECKING:
    from ..evaluation import Evaluation
    from ..summarizer import Summarizer

HELP = """
Summarizes documents whose summaries are known, and prints ROUGE-1, ROUGE-2 and ROUGE-L (F1 x 100, stemmed): shared
words, shared pairs of words, and words in the same order. Beside the model stand rules that need no training: the first
sentence, eight words after the first verb, the sentence that LexRank or TextRank finds most central, the summary of the
most similar training document, and what the best choice of one sentence could reach if it knew the answer (oracle).
Each kind of pairs has figures of its own; the interval is a bootstrap over pairs, 95 %.

examples:
  linattn lab summarize evaluate                                    # the shipped weights on the prepared test pairs
  linattn lab summarize evaluate --model FOLDER --kernel softmax    # what `train` wrote, with another kernel
  linattn lab summarize evaluate --pairs mine.jsonl --json mine.json
  linattn lab summarize evaluate --data mixture --kinds manuals readmes --limit 300
  linattn lab summarize evaluate --predictions said.jsonl           # what it said, beside what people said
  linattn lab summarize evaluate --lengthen 1000 --limit 200        # the subject at the beginning of a long text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_model_arguments(parser)
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of `prepare` (default %(default)s)")
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="which pairs of --data")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="any .jsonl or .csv of document and summary instead")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="of --data (default: all that are there)")
    parser.add_argument("--limit", type=whole(), metavar="N", help="the first N pairs of each kind alone")
    parser.add_argument(
        "--lengthen",
        type=whole(0),
        default=0,
        metavar="WORDS",
        help="follow each document by others, until it is this long",
    )
    parser.add_argument("--no-model", action="store_true", help="the baselines alone")
    add_output(parser, "--predictions", "write each document's summaries as JSON lines")
    add_figures(parser)
    add_common(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it writes: the same for `evaluate` and `run`."""
    parser.add_argument("--model", type=Path, help="folder or file that `train` wrote (default: the shipped weights)")
    parser.add_argument("--kernel", help="of every attention (default: the one the model was trained with)")
    parser.add_argument(
        "--beam", type=whole(), help="summaries followed at once; 1 is greedy (default: what was found best)"
    )


def run(args: argparse.Namespace) -> int:
    require("rouge_score", "sklearn", "tokenizers")
    from ..baselines import NEAREST

    pairs = read_pairs(args.pairs) if args.pairs else read_split(args.data, args.split)
    train = read_training(args.data, needed=args.pairs is None)
    model = None if args.no_model else load_model(args)
    kinds = [kind for kind in dict.fromkeys(pair.kind for pair in pairs) if not args.kinds or kind in args.kinds]
    if not kinds:
        raise ValueError(f"there are no pairs of {', '.join(args.kinds)} in {args.pairs or args.data}.")
    results = []
    for kind in kinds:
        chosen = [pair for pair in pairs if pair.kind == kind][: args.limit]
        if args.lengthen:
            chosen = lengthened_pairs(chosen, args.lengthen, args.seed)
        found = evaluate(kind, chosen, [pair for pair in train if pair.kind == kind], model, args)
        longer = f", each document lengthened to {args.lengthen} words" if args.lengthen else ""
        print(f"\n{len(chosen)} pairs of {args.pairs or args.split}{f', {kind}' if kind else ''}{longer}\n")
        print(found.table())
        results.append(found)
    if not train:
        print(f"\n{NEAREST}: left out, there are no training pairs in {args.data}")
        print("(`linattn lab summarize prepare` makes them, --data names a folder of them)")
    if args.json:
        several = {"kinds": {found.kind: found.figures() for found in results}}
        write_json(args.json, several if len(results) > 1 else results[0].figures())
        print(f"wrote {args.json}")
    save_figures(args, published(results, args.seed))
    if args.predictions:
        write_predictions(args.predictions, results)
        print(f"wrote {args.predictions}")
    return 0


def load_model(args: argparse.Namespace) -> "Summarizer":
    from ..decoding import BEAM
    from ..summarizer import Summarizer

    model = Summarizer.load(args.model, args.kernel)
    args.beam = BEAM if args.beam is None else args.beam
    print(f"model: {args.model or 'shipped'}, kernel {model.model.config.kernel}, beam {args.beam}")
    return model


def evaluate(
    kind: str, pairs: list[Pair], train: list[Pair], model: "Summarizer | None", args: argparse.Namespace
) -> "Evaluation":
    """What the model and the rules say of pairs of one kind, and what that is worth."""
    from ..baselines import baselines
    from ..evaluation import MODEL, Evaluation

    said = {}
    if model is not None:
        documents = [model.marked(pair.document, kind) for pair in pairs]
        options: Any = {"beam": args.beam, "progress": lambda groups: progress(groups, desc=f"model {kind}".strip())}
        said = {MODEL: model.summarize(documents, **options)}
    return Evaluation(kind, pairs, said | baselines(pairs, train, progress), args.seed)


def read_training(folder: Path, needed: bool) -> list[Pair]:
    """The training pairs; none where they are not needed and not there."""
    return read_split(folder, "train") if needed or (folder / "train.jsonl").is_file() else []


def published(results: "list[Evaluation]", seed: int) -> dict[str, Figure]:
    """What the docs print: a table for each kind, with the model, the lead sentences and the oracle."""
    from ..baselines import LEAD, ORACLE
    from ..evaluation import MODEL
    from ..rouge import NAMES

    found = {}
    for result in results:
        for name in ("first sentence", LEAD, ORACLE, MODEL):
            for measure, value in result.intervals(name).items():
                key = f"{result.kind or 'pairs'}|{name}|{NAMES[measure]}"
                found[key] = Figure(**value, seeds=(seed,), format=".2f")
    return found


def write_predictions(path: Path, results: "list[Evaluation]") -> None:
    lines = [json.dumps(row, ensure_ascii=False) for result in results for row in result.rows()]
    write_file(path, lambda temporary: temporary.write_text("\n".join(lines) + "\n", encoding="utf-8"))
