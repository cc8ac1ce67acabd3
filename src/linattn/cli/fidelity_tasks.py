"""The part of `linattn fidelity` that asks questions: synthetic tasks, and the baselines that drop keys."""

import argparse
import functools
from typing import Any

from .._commandline import whole
from .progress import progress

RULES = ["streaming", "h2o", "tova", "snapkv", "pyramidkv", "knorm", "keydiff", "expected", "duo"]  # of hf.baselines
TASKS = ["passkey", "many keys", "variables", "table", "passage", "few-shot"]  # of hf.tasks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--tasks, --task-texts and --baselines."""
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=TASKS,
        metavar="TASK",
        help="also run synthetic tasks of --length tokens: the model reads first and is asked at the end; "
        f"{', '.join(TASKS)} (default: all)",
    )
    parser.add_argument("--task-texts", type=whole(2), default=8, metavar="N", help="texts of each task (default 8)")
    parser.add_argument(
        "--baselines",
        nargs="*",
        choices=RULES,
        metavar="RULE",
        help=f"also show caches that drop keys, at equal memory: {', '.join(RULES)} (default: all)",
    )
    parser.add_argument(
        "--calibrated-baselines",
        action="store_true",
        help="show the caches of --baselines also with near/far's budgets by head, as '.., calibrated'",
    )


def check(args: argparse.Namespace) -> None:
    """Refuses baselines that cannot be made, before a model is loaded."""
    if args.calibrated_baselines and args.baselines is None:
        raise ValueError("--calibrated-baselines adds to --baselines: give that too.")
    needs = (
        "--calibrated-baselines" if args.calibrated_baselines else "duo" if "duo" in (args.baselines or []) else None
    )
    if needs and not (args.calibrate or args.calibration):
        raise ValueError(f"{needs} needs budgets by head: add --calibrate or --calibration.")


def baselines(model: Any, kernel: Any, mean_slots: float, found: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Name -> what `fidelity.read_language` takes, with the memory that near/far with `mean_slots` slots has at its peak."""
    if args.baselines is None:
        return {}
    from ..hf.baselines import baselines_for

    kernels = baselines_for(
        model,
        args.baselines,
        kernel,
        mean_slots,
        found=found,
        length=args.length,
        calibrated=args.calibrated_baselines,
    )
    return {name: (by_layer, None) for name, by_layer in kernels.items()}


def run_tasks(model: Any, tokenizer: Any, choices: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every task with every kind of attention, as plain figures."""
    from ..hf import weights
    from ..hf.tasks import run_task

    encode, start = functools.partial(weights.plain_ids, tokenizer), weights.start_tokens(tokenizer)
    rows = []
    for label in progress([f"{task}: {name}" for task in args.tasks or TASKS for name in choices]):
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
