"""linattn lab summarize compare: models that differ in their kernel, side by side."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linattn._files import parsing
from linattn.measure import peak_memory
from linattn.measure.machine import machine

from ...commandline import add_common, describe, progress, require, table, whole, write_json
from ...threads import one_thread
from ..model import Seq2Seq
from ..pairs import Pair, data_folder, read_split

STEPS = 5  # timed, of which the quickest counts
HELP = """
Compares models that `linattn lab summarize train` made: validation loss, ROUGE on the test pairs, the time of a training
step, and the time and memory it takes to read 1k, 8k and 64k tokens (encoder and what the decoder keeps of it). Times
are CPU seconds on one thread, so that other work on the machine does not count. Exact softmax takes minutes for 64k.

examples:
  linattn lab summarize compare softmax elu relu --json compare.json
  linattn lab summarize compare softmax softmax:nearfar   # the same weights, read by near/far attention
  linattn lab summarize compare elu --limit 100 --tokens 1024
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument("models", nargs="+", metavar="FOLDER[:KERNEL]", help="of `train`; with another kernel if named")
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of `prepare` (default %(default)s)")
    parser.add_argument("--limit", type=whole(), metavar="N", help="ROUGE of the first N test pairs alone")
    parser.add_argument(
        "--tokens", type=whole(), nargs="+", default=[1024, 8192, 65536], metavar="N", help="lengths to read"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    require("rouge_score", "tokenizers")
    pairs = {part: read_split(args.data, part) for part in ("validation", "test")}
    figures = {}
    with one_thread():
        for name in progress(args.models, desc="models"):
            figures[name] = figures_of(name, pairs["validation"], pairs["test"][: args.limit], args.tokens, args.seed)
    rows = [["model", "kernel", "loss", "R-1", "R-2", "R-L", "step", *(f"read {n}" for n in args.tokens)]]
    for name, found in figures.items():
        scores = [f"{found[key]:.2f}" for key in ("loss", "rouge1", "rouge2", "rougeL")]
        read = [f"{r['seconds']:.3g} s, {_megabytes(r['bytes'])}" for r in found["read"].values()]
        rows.append([name, found["kernel"], *scores, f"{found['step']:.2f} s", *read])
    print(table(rows, "  rrrrr" + "r" * len(args.tokens)))
    if args.json:
        write_json(args.json, {"machine": machine(), "pairs": len(pairs["test"][: args.limit]), "models": figures})
        print(f"wrote {args.json}")
    return 0


def figures_of(name: str, validation: list[Pair], test: list[Pair], lengths: list[int], seed: int) -> dict[str, Any]:
    """Everything about one model; `name` is a folder, and after a colon the kernel if not its own."""
    from ..examples import examples, loss
    from ..rouge import rouge
    from ..summarizer import Summarizer

    folder, _, kernel = name.partition(":")
    summarizer = Summarizer.load(Path(folder), kernel or None)
    model = summarizer.model
    log_path = Path(folder) / "log.json"
    with parsing(log_path):
        log = json.loads(log_path.read_text(encoding="utf-8"))
        batch_size, longest = log["trainer"]["batch_size"], summarizer.facts["longest"]
    held_out = examples(validation, summarizer.tokens, longest)
    total = counted = 0.0
    with torch.no_grad():
        for start in range(0, len(held_out), batch_size):
            part, tokens = loss(model, held_out[start : start + batch_size])
            total, counted = total + float(part), counted + tokens
    said = summarizer.summarize([summarizer.marked(pair.document, pair.kind) for pair in test])
    scores = rouge(said, [pair.summary for pair in test])
    read = {str(n): _read(model, n, seed) for n in lengths}
    batch = held_out[:batch_size]
    step = min(_seconds(lambda: _train_step(model, batch)) for _ in range(STEPS))
    return {"kernel": model.config.kernel, "loss": total / counted, **scores, "step": step, "read": read}


@torch.no_grad()
def _read(model: Seq2Seq, tokens: int, seed: int) -> dict[str, Any]:
    """Seconds and peak bytes of reading random tokens: the encoder, and each decoder layer's state of the document."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(3, model.config.vocabulary, (1, tokens), generator=generator)
    model.start(model.encode(source[:, :256]))
    seconds = 0.0

    def call() -> object:
        nonlocal seconds
        began = time.process_time()
        read = model.start(model.encode(source))
        seconds = time.process_time() - began
        return read

    peak = peak_memory(call)
    return {"seconds": seconds, "bytes": peak}


def _train_step(model: Seq2Seq, batch: list[Any]) -> None:
    from ..examples import loss

    model.train()
    total, counted = loss(model, batch)
    (total / counted).backward()
    model.zero_grad(set_to_none=True)
    model.eval()


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _megabytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:.0f} MB"
