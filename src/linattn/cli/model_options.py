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
    parser.add_argument("--calibration", metavar="FOLDER", help="near/far budgets saved there (default: --slots)")
    parser.add_argument("--window", type=whole(0), default=128, metavar="N", help="near/far: last tokens, exact")
    parser.add_argument("--slots", type=whole(0), default=128, metavar="N", help="near/far: slots for farther tokens")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--context", type=whole(), metavar="N", help="positions of a sequence (default: the model's)")
    parser.add_argument("--threads", type=whole(), metavar="N", help="of torch (default: torch's own number)")


def load_served(args: argparse.Namespace, **options: Any) -> Any:
    """The ServedModel of these options; ValueError if the files are not those of a model."""
    check_model(args.model)
    require("transformers", "safetensors", "tqdm", requirement="'linattn[hf]'")
    from ..serve.model import ModelChoice

    choice = ModelChoice(args.model, args.kernel, args.calibration, args.window, args.slots, args.dtype)
    return load_choice(choice, args.context, args.threads, **options)


def load_choice(choice: Any, context: int | None, threads: int | None, **options: Any) -> Any:
    """The ServedModel of a ModelChoice."""
    import torch

    from ..serve.model import prepare

    if threads:
        torch.set_num_threads(threads)
    model, tokenizer = load_model(choice.model)
    return prepare(model, tokenizer, choice, context=context, **options)
