"""linattn lab summarize evaluate: ROUGE of a model beside what simple rules reach."""

import argparse
import json
import time
from pathlib import Path

from ...commandline import add_common, add_output, describe, progress, require, table, whole, write_file, write_json
from ..long_documents import lengthened_pairs
from ..pairs import Pair, data_folder, read_pairs, read_split

HELP = """
Summarizes documents whose summaries are known, and prints ROUGE-1, ROUGE-2 and ROUGE-L (F1 x 100, stemmed): shared
words, shared pairs of words, and words in the same order. Beside the model stand rules that need no training: the first
sentence, eight words after the first verb, the sentence that LexRank or TextRank finds most central, the summary of the
most similar training document, and what the best choice of one sentence could reach if it knew the answer (oracle).

examples:
  linattn lab summarize evaluate                                    # the shipped weights on the prepared test pairs
  linattn lab summarize evaluate --model FOLDER --kernel softmax    # what `train` wrote, with another kernel
  linattn lab summarize evaluate --pairs mine.jsonl --json mine.json
  linattn lab summarize evaluate --predictions said.jsonl           # what it said, beside what people said
  linattn lab summarize evaluate --lengthen 1000 --limit 200        # the subject at the beginning of a long text
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    add_model_arguments(parser)
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of `prepare` (default %(default)s)")
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="which pairs of --data")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="any .jsonl or .csv of document and summary instead")
    parser.add_argument("--limit", type=whole(), metavar="N", help="the first N pairs alone")
    parser.add_argument(
        "--lengthen",
        type=whole(0),
        default=0,
        metavar="WORDS",
        help="follow each document by others, until it is this long",
    )
    parser.add_argument("--no-model", action="store_true", help="the baselines alone")
    add_output(parser, "--predictions", "write each document's summaries as JSON lines")
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
    from ..baselines import NEAREST, ORACLE, baselines
    from ..rouge import MEASURES, rouge

    pairs = (read_pairs(args.pairs) if args.pairs else read_split(args.data, args.split))[: args.limit]
    if args.lengthen:
        pairs = lengthened_pairs(pairs, args.lengthen, args.seed)
    train = read_training(args.data, needed=args.pairs is None)
    references = [pair.summary for pair in pairs]
    said = {} if args.no_model else {"model": summarize(args, pairs)}
    rules = baselines(pairs, train, progress)
    figures = {name: rouge(found, references) for name, found in (said | rules).items()}

    rows = [["", "ROUGE-1", "ROUGE-2", "ROUGE-L"]]
    order = sorted(rules, key=lambda name: (name == ORACLE, figures[name]["rouge1"]))
    for name in [*order, *said]:
        rows.append([name, *(f"{figures[name][measure]:.2f}" for measure in MEASURES)])
    longer = f", each document lengthened to {args.lengthen} words" if args.lengthen else ""
    print(f"{len(pairs)} pairs of {args.pairs or args.split}{longer}\n")
    print(table(rows, " rrr"))
    if not train:
        print(f"\n{NEAREST}: left out, there are no training pairs in {args.data}")
        print("(`linattn lab summarize prepare` makes them, --data names a folder of them)")
    if args.json:
        chosen = {name: figures[name] for name in order}
        write_json(args.json, {**figures.get("model", {}), "pairs": len(pairs), "baselines": chosen})
        print(f"wrote {args.json}")
    if args.predictions:
        write_predictions(args.predictions, pairs, said | rules)
        print(f"wrote {args.predictions}")
    return 0


def summarize(args: argparse.Namespace, pairs: list[Pair]) -> list[str]:
    """What the model says of each document; prints what it is and how long it took."""
    from ..decoding import BEAM
    from ..summarizer import Summarizer

    summarizer = Summarizer.load(args.model, args.kernel)
    beam = BEAM if args.beam is None else args.beam
    began = time.perf_counter()
    found = summarizer.summarize(
        [pair.document for pair in pairs], beam=beam, progress=lambda groups: progress(groups, desc="model")
    )
    seconds = time.perf_counter() - began
    kernel = summarizer.model.config.kernel
    each = 1000 * seconds / len(pairs)
    print(f"model: {args.model or 'shipped'}, kernel {kernel}, beam {beam}; {each:.0f} ms a document")
    return found


def read_training(folder: Path, needed: bool) -> list[Pair]:
    """The training pairs; none where they are not needed and not there."""
    return read_split(folder, "train") if needed or (folder / "train.jsonl").is_file() else []


def write_predictions(path: Path, pairs: list[Pair], said: dict[str, list[str]]) -> None:
    lines = (
        json.dumps(
            {"document": pair.document, "summary": pair.summary} | dict(zip(said, found, strict=True)),
            ensure_ascii=False,
        )
        for pair, *found in zip(pairs, *said.values(), strict=True)
    )
    write_file(path, lambda temporary: temporary.write_text("\n".join(lines) + "\n", encoding="utf-8"))
