"""`linattn fidelity`: a pretrained model with replaced attention, compared with the original."""

import argparse
import functools
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._commandline import add_output, check_writable, require, whole
from .._files import write_json, write_text
from . import fidelity_tasks
from .models import HELP, add_dtype, check_model, load_model, read_text
from .names import KERNELS
from .progress import progress

OWN = "own"
EXAMPLES = """examples:
  linattn fidelity --model smollm2 --text README.md --length 2048
  linattn fidelity --model smollm2 --calibrate novel.txt --save model-folder --text manual.txt code.py
  linattn fidelity --model smollm2 --calibrate novel.txt --slots 192 --recall 32 --needle --text manual.txt code.py
  linattn fidelity --model smollm2 --calibrate own --slots 192 --tasks --baselines --length 2048
  linattn fidelity --model minilm --text a.txt b.txt --length 512 --window 32
  linattn fidelity --model hybrid-folder --dtype bfloat16 --text manual.txt
In a hybrid model "attached" is the model with its linear layers on the engine: its perplexity is that of exact.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--model", required=True, help=HELP)
    parser.add_argument(
        "--text", nargs="+", default=[], metavar="FILE", help="texts to read, each --length tokens long"
    )
    parser.add_argument("--length", type=whole(64), default=2048, metavar="N", help="tokens of each text")
    parser.add_argument(
        "--window", type=whole(0), default=128, metavar="N", help="last tokens that are attended exactly"
    )
    parser.add_argument(
        "--slots",
        type=whole(0),
        metavar="N",
        help="of every head, or the mean over heads (default 128, or what a calibration was saved with)",
    )
    parser.add_argument(
        "--state-bits",
        type=int,
        choices=(8, 16, 32),
        default=8,
        help="of the keys and values in near/far's states, and in those of --baselines (default 8)",
    )
    parser.add_argument(
        "--recall",
        type=whole(0),
        default=0,
        metavar="K",
        help="also show near/far that recalls K blocks of 8 far tokens",
    )
    parser.add_argument(
        "--recall-price",
        type=whole(0),
        metavar="N",
        help="count a recalling head as N slots more (default: by its memory)",
    )
    _add_calibration(parser)
    parser.add_argument(
        "--kernels",
        nargs="*",
        choices=[name for name in KERNELS if name not in ("softmax", "nearfar")],
        default=["elu", "positive"],
        metavar="NAME",
        help="feature-map kernels to show too",
    )
    parser.add_argument(
        "--needle", action="store_true", help="also hide facts in each text and ask for them at the end"
    )
    fidelity_tasks.add_arguments(parser)
    add_dtype(parser)
    add_output(parser, "--json", "write all figures")
    add_output(parser, "--html", "write a page")


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--calibrate",
        metavar="FILE",
        help="assign slots by head, measured on this text; `own`: on one that the model writes",
    )
    source.add_argument("--calibration", metavar="FOLDER", help="use the budgets saved there")
    parser.add_argument(
        "--calibrate-length",
        type=whole(256),
        metavar="N",
        help="tokens of each passage of that text (default: --length, at most 8192)",
    )
    parser.add_argument(
        "--calibrate-passages",
        type=whole(),
        metavar="N",
        help="passages to measure on, spread over that text (default: as many as have 8192 tokens together)",
    )
    parser.add_argument("--save", metavar="FOLDER", help="where to keep the budgets of --calibrate")


def run(args: argparse.Namespace) -> int:
    check_model(args.model)
    if not args.text and args.tasks is None:
        raise ValueError("name texts to read by --text, or run --tasks.")
    fidelity_tasks.check(args)
    for file in [*args.text, *([args.calibrate] if args.calibrate not in (None, OWN) else [])]:
        read_text(file)
    if args.save:
        if not args.calibrate:
            raise ValueError("--save keeps the budgets of --calibrate: name a text by --calibrate.")
        check_writable(f"{args.save}/budgets")
    require("transformers", requirement="'linattn[hf]'")
    if args.html:
        require("jinja2")
    result = measure(args)
    print(as_text(result))
    if args.json:
        write_json(args.json, result)
    if args.html:
        write_text(args.html, as_page(result))
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every text with every kind of attention, as plain figures."""
    from ..hf import fidelity, weights
    from ..hf.budgets import Calibration
    from ..hf.hybrids.layers import linear_layers
    from ..hf.modules import attention_modules, is_sliding
    from ..hf.needle import find_needles
    from ..measure.machine import machine
    from ..nearfar import NearFar

    saved = Calibration.load(args.calibration) if args.calibration else None
    model, tokenizer = load_model(args.model, args.dtype)
    encoder = not model.can_generate()
    texts = {Path(f).name: weights.encode(tokenizer, Path(f), args.length) for f in args.text}
    slots = 128 if args.slots is None else args.slots
    kernel = NearFar(args.window, slots, recall_bits=8, state_bits=args.state_bits)
    found = _budgets(model, tokenizer, kernel, slots, saved, args)
    softmax = any(not is_sliding(module) for _, module in attention_modules(model))
    choices: dict[str, Any] = {"exact": None}
    if linear_layers(model):
        choices["attached"] = (None, None)  # linear layers on the engine, softmax layers as they are
    if softmax:
        choices |= _choices(kernel, found, slots, args)
    if not encoder:
        own, mean = (kernel, float(slots)) if found is None else (found.near_far(), found.mean_slots)
        choices |= fidelity_tasks.baselines(model, own, mean, found, args) if softmax else {}
        weights.warn_of_missing_start(model, tokenizer)
    read = fidelity.read_encoder if encoder else fidelity.read_language
    readings: dict[tuple[str, str], fidelity.Reading] = {}
    rows = []
    for label in progress([f"{text}: {name}" for text in texts for name in choices]):
        text, name = label.rsplit(": ", 1)
        reading = readings[text, name] = read(model, texts[text], choices[name])
        row = _figures(text, name, reading, readings[text, "exact"], encoder)
        if args.needle and not encoder:
            encode, turn = functools.partial(weights.plain_ids, tokenizer), list(texts).index(text)
            needles = find_needles(model, encode, texts[text], choices[name], length=reading.tokens, turn=turn)
            row |= {f"needle_{figure}": x for figure, x in asdict(needles).items()}
        rows.append(row)
    first = list(texts.values())[:1] if softmax else []
    layers = [error for ids in first for error in fidelity.layer_errors(model, ids, choices["near/far"][0])]
    asked = fidelity_tasks.run_tasks(model, tokenizer, choices, args) if args.tasks is not None and not encoder else []
    if found is not None:
        kernel = found.near_far()
    shape = ", ".join(f"{name} {getattr(kernel, name):g}" for name in ("window", "sinks", "block", "alpha"))
    given = f"{slots} slots" if found is None else f"{found.mean_slots:.0f} slots on average, by head"
    setting = {"model": args.model, "length": args.length, "kernel": f"{given}, {shape}", "encoder": encoder}
    figures = {"rows": rows, "summary": _summary(rows), "layer_errors": layers, "tasks": asked}
    return {"setting": setting, "machine": machine(), **figures}


def _budgets(model: Any, tokenizer: Any, kernel: Any, slots: int, saved: Any, args: argparse.Namespace) -> Any:
    """Slots by head: measured now, or as saved, for the mean that was asked for; None if all heads have the same."""
    from ..hf import weights
    from ..hf.calibrate import calibrate
    from ..hf.nearfar_choice import LONGEST
    from ..hf.self_calibration import own_text, random_tokens

    if args.calibrate:
        count = args.calibrate_length or min(args.length, LONGEST)
        if args.calibrate == OWN:
            ids = (own_text if model.can_generate() else random_tokens)(model, count)
        else:
            passages = args.calibrate_passages or max(1, LONGEST // count)
            ids = weights.encode(tokenizer, Path(args.calibrate), count, passages)
        price = {"recall": args.recall, "recall_price": args.recall_price}
        return calibrate(model, ids, slots, kernel=kernel, save=args.save, **price)
    if saved is None or (args.slots is None and args.recall_price is None):
        return saved
    mean = round(saved.mean_slots) if args.slots is None else slots
    return saved.with_mean(mean, recall_price=args.recall_price)


def _figures(text: str, name: str, reading: Any, exact: Any, encoder: bool) -> dict[str, Any]:
    """The row of one text read with one attention."""
    from ..hf import fidelity

    row = {
        "text": text,
        "attention": name,
        "tokens": reading.tokens,
        "ms_per_token": 1e3 * reading.seconds / reading.tokens,
    }
    if encoder:
        return {**row, "cosine": fidelity.cosine(reading, exact)}
    ratio = reading.perplexity / exact.perplexity
    return {**row, "perplexity": reading.perplexity, "ratio": ratio, "state_bytes": reading.state_bytes}


def _choices(kernel: Any, found: Any, slots: int, args: argparse.Namespace) -> dict[str, Any]:
    """Name -> what `fidelity.read_language` takes: the attentions that are compared."""
    from ..nearfar import NearFar

    choices: dict[str, Any] = {}
    mean = float(slots)
    if found is None:
        choices["near/far"] = (kernel, None)
        if args.recall:
            choices["with recall"] = (kernel.with_slots(slots, args.recall), None)
    else:
        mean, kernel = found.mean_slots, found.near_far()
        choices["near/far"] = (found.with_mean(round(mean), recall=False).kernels(), None)
        if any(any(row) for row in found.recall.values()):
            choices["with recall"] = (found.kernels(), None)
    alone = NearFar(kernel.window + round(mean), 0, kernel.sinks, kernel.block, state_bits=kernel.state_bits)
    choices["window alone"] = (alone, None)
    return choices | {name: (name, None) for name in args.kernels}


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Attention -> geometric mean of the perplexity ratios, or mean cosine."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["attention"], []).append(row["cosine"] if "cosine" in row else math.log(row["ratio"]))
    means = {name: sum(x) / len(x) for name, x in found.items()}
    return means if rows and "cosine" in rows[0] else {name: math.exp(x) for name, x in means.items()}


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["text"], row["attention"], str(row["tokens"])]
    if "cosine" in row:
        return [*cells, f"{row['cosine']:.4f}", f"{row['ms_per_token']:.2f}"]
    cells += [
        f"{row['perplexity']:.3f}",
        f"{row['ratio']:.4f}",
        f"{row['state_bytes'] / 2**20:.2f}",
        f"{row['ms_per_token']:.2f}",
    ]
    if "needle_first" not in row:
        return cells
    return [*cells, f"{row['needle_first']:.2f}", f"{row['needle_rank']:.1f}", f"{row['needle_log_likelihood']:.2f}"]


def _header(rows: list[dict[str, Any]]) -> list[str]:
    if "cosine" in rows[0]:
        return ["text", "attention", "tokens", "cosine", "ms/token"]
    header = ["text", "attention", "tokens", "perplexity", "/ exact", "state MiB", "ms/token"]
    return [*header, "found", "rank", "log p"] if "needle_first" in rows[0] else header


def as_text(result: dict[str, Any]) -> str:
    """The table for a terminal."""
    lines = [f"{result['setting']['model']}: {result['setting']['kernel']}"]
    if result["tasks"]:
        lines.append("tasks, share of the answers' tokens ranked first, with 95 % intervals")
        lines += _aligned(fidelity_tasks.tasks_table(result["tasks"]))
    if not result["rows"]:
        return "\n".join(lines)
    lines += _aligned([_header(result["rows"]), *(_cells(row) for row in result["rows"])])
    what = "mean cosine with exact" if result["setting"]["encoder"] else "geometric mean of perplexity / exact"
    lines.append(what + ": " + ", ".join(f"{name} {x:.4f}" for name, x in result["summary"].items()))
    if not result["layer_errors"]:
        return "\n".join(lines)
    worst = max(range(len(result["layer_errors"])), key=result["layer_errors"].__getitem__)
    mean = sum(result["layer_errors"]) / len(result["layer_errors"])
    lines.append(
        f"relative error of a layer's output: mean {mean:.4f}, most {result['layer_errors'][worst]:.4f} (layer {worst})"
    )
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=False)))
        for row in rows
    ]


def as_page(result: dict[str, Any]) -> str:
    from ..pages import render_page

    return render_page(
        Path(__file__).with_name("fidelity_page.html.j2"),
        title=f"{result['setting']['model']}: attention replaced, no training",
        kernel=result["setting"]["kernel"],
        texts=[_header(result["rows"]), *(_cells(row) for row in result["rows"])] if result["rows"] else [],
        tasks=fidelity_tasks.tasks_table(result["tasks"]) if result["tasks"] else [],
        means=[["attention", "mean"], *([name, f"{x:.4f}"] for name, x in result["summary"].items())],
        layers=[["layer", "error"], *([i, f"{error:.4f}"] for i, error in enumerate(result["layer_errors"]))],
        mean_chart=_chart_of_means(result),
        layer_chart={
            "title": "relative error of each layer's output",
            "series": [{"label": "near/far", "points": [list(point) for point in enumerate(result["layer_errors"])]}],
            "x": {"label": "layer"},
            "y": {"choice": True},
        },
    )


def _chart_of_means(result: dict[str, Any]) -> dict[str, Any]:
    """Bars for chart.js: one for each attention, beside exact's."""
    encoder = result["setting"]["encoder"]
    points = [[i, x] for i, x in enumerate(result["summary"].values())]
    return {
        "title": "mean cosine with exact" if encoder else "perplexity over exact's, geometric mean",
        "series": [{"label": "cosine" if encoder else "perplexity / exact", "points": points, "bars": True}],
        "x": {"names": dict(enumerate(result["summary"])), "ticks": [x for x, _ in points]},
        "y": {"choice": True, "log": not encoder and max(result["summary"].values()) > 10},
        "rules": [{"y": 1, "label": "exact"}],
    }
