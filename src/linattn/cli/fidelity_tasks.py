"""The part of `linattn fidelity` that asks questions: synthetic tasks, and the baselines that drop keys."""

import argparse
import functools
from typing import Any

from .._commandline import whole
from .progress import progress

RULES = ["streaming", "h2o", "tova", "snapkv", "pyramidkv", "knorm", "keydiff", "expected"]  # of hf.eviction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--tasks, --task-texts and --baselines."""
    parser.add_argument(
        "--tasks",
        action="store_true",
        help="also run synthetic tasks of --length tokens: the model reads first and is asked at the end",
    )
    parser.add_argument("--task-texts", type=whole(2), default=8, metavar="N", help="texts of each task (default 8)")
    parser.add_argument(
        "--baselines",
        nargs="*",
        choices=RULES,
        metavar="RULE",
        help=f"also show caches that drop keys, at equal memory: {', '.join(RULES)} (default: all)",
    )


def baselines(model: Any, names: list[str] | None, kernel: Any, mean_slots: float) -> dict[str, Any]:
    """Name -> what `fidelity.read_language` takes, with the memory that near/far with `mean_slots` slots has at its peak."""
    if names is None:
        return {}
    from ..hf.eviction import baseline, rotary_frequencies
    from ..hf.modules import attention_modules, head_counts, head_dim, is_sliding

    modules = [module for _, module in attention_modules(model) if not is_sliding(module)]
    dim, (heads, kv_heads) = head_dim(modules[0]), head_counts(modules[0])
    entries = kernel.state_bytes(round(mean_slots), dim, dim, heads // kv_heads) // kernel.entry_bytes(dim, dim)
    options = {"block": kernel.block, "bits": kernel.state_bits, "frequencies": rotary_frequencies(modules[0].config)}
    if not names:
        names = [name for name in RULES if name != "expected" or options["frequencies"] is not None]
    found = {}
    for name in names:
        by_layer = list(baseline(name, len(modules), entries - kernel.block, **options).values())
        found[name] = (dict(zip((module.layer_idx for module in modules), by_layer, strict=True)), None)
    return found


def run_tasks(model: Any, tokenizer: Any, choices: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every task with every kind of attention, as plain figures."""
    from ..hf import weights
    from ..hf.tasks import TASKS, run_task

    encode, start = functools.partial(weights.plain_ids, tokenizer), weights.start_tokens(tokenizer)
    rows = []
    for label in progress([f"{task}: {name}" for task in TASKS for name in choices]):
        task, name = label.split(": ", 1)
        options = {"length": args.length, "texts": args.task_texts, "start": start}
        score = run_task(model, encode, task, choices[name], **options)
        rows.append({"task": task, "attention": name, "first": score.first, "interval": score.interval})
    return rows


def tasks_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each kind of attention, a column for each task."""
    tasks, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "attention"))
    cells = {(row["attention"], row["task"]): f"{row['first']:.2f} ±{row['interval']:.2f}" for row in rows}
    return [["attention", *tasks], *([name, *(cells[name, task] for task in tasks)] for name in names)]
