"""Options of the commands that serve a model: which one, with which attention."""

import argparse
from typing import Any

from .._commandline import require, whole
from .models import HELP, check_model, load_model
from .names import KERNELS


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("--model", required=required, help=HELP)
    parser.add_argument(
        "--kernel", choices=KERNELS, default="softmax", help="attention; softmax is the model's own, exact"
    )
    add_nearfar_options(parser)
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--context", type=whole(), metavar="N", help="positions of a sequence (default: the model's)")
    parser.add_argument("--threads", type=whole(), metavar="N", help="of torch (default: torch's own number)")


def add_nearfar_options(parser: argparse.ArgumentParser) -> None:
    """--window, --slots, --memory, --equal-slots and --calibration; each is None or False where it is not given."""
    group = parser.add_argument_group(
        "near/far",
        "Softmax with a bounded state. Which heads need many slots is measured once, on a text that the model writes "
        "(minutes; kept in the cache folder), unless budgets were saved beside the model.",
    )
    group.add_argument(
        "--window", type=whole(0), metavar="N", help="last tokens that are attended exactly (default 128)"
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--slots", type=whole(0), metavar="N", help="for farther tokens, mean over heads (default 128)")
    size.add_argument("--memory", metavar="SIZE", help="instead: of the states of one sequence, such as 64MiB")
    size.add_argument("--calibration", metavar="FOLDER", help="use the budgets saved there")
    group.add_argument("--equal-slots", action="store_true", help="measure nothing: every head gets --slots")


def nearfar_choice(args: argparse.Namespace) -> Any:
    """The NearFarChoice of these options."""
    from ..hf.budgets import Calibration
    from ..hf.nearfar_choice import NearFarChoice
    from ..hf.self_calibration import parse_bytes

    if args.memory is not None:
        parse_bytes(args.memory)
    if args.calibration is not None:  # what is wrong with it is said before a model is loaded
        Calibration.load(args.calibration)
    if args.equal_slots and (args.memory is not None or args.calibration is not None):
        raise ValueError("--equal-slots gives every head --slots: it goes with neither --memory nor --calibration.")
    if args.calibration is not None and args.window is not None:
        raise ValueError("--calibration has a window of its own: leave --window out.")
    given = {name: getattr(args, name) for name in ("window", "slots", "memory", "calibration")}
    return NearFarChoice(**{k: v for k, v in given.items() if v is not None}, equal_slots=args.equal_slots)


def load_served(args: argparse.Namespace, **options: Any) -> Any:
    """The ServedModel of these options; ValueError if the files are not those of a model."""
    check_model(args.model)
    require("transformers", "safetensors", "tqdm", requirement="'linattn[hf]'")
    from ..serve.model import ModelChoice

    choice = ModelChoice(args.model, args.kernel, nearfar_choice(args), args.dtype)
    return load_choice(choice, args.context, args.threads, **options)


def load_choice(choice: Any, context: int | None, threads: int | None, **options: Any) -> Any:
    """The ServedModel of a ModelChoice."""
    import torch

    from ..serve.model import prepare

    if threads:
        torch.set_num_threads(threads)
    model, tokenizer = load_model(choice.model)
    return prepare(model, tokenizer, choice, context=context, **options)
