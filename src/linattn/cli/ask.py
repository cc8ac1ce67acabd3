"""`linattn ask`: a question about a document that `linattn read` has read."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from .._commandline import real, require, seed, whole, words
from .models import HELP
from .names import MODELS

EXAMPLES = """examples:
  linattn read book.txt --model smollm2 --kernel nearfar --save book.state
  linattn ask book.state "Who is the main character?"
  linattn ask book.state "Summarize the second chapter." --tokens 300 --temperature 0.7
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("state", metavar="STATE", help="a file that `linattn read` wrote")
    parser.add_argument("question", type=words, metavar="QUESTION", help="about the document")
    parser.add_argument("--model", help=f"{HELP} (default: the one that read it)")
    parser.add_argument("--tokens", type=whole(), default=200, metavar="N", help="of the answer, at most")
    parser.add_argument(
        "--temperature", type=real(0, most=2), default=0.0, help="of sampling; 0 always takes the likeliest token"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of sampling")
    parser.add_argument(
        "--context", type=whole(), metavar="N", help="positions of a sequence (default: as it was read)"
    )
    parser.add_argument("--threads", type=whole(), metavar="N", help="of torch (default: torch's own number)")


def run(args: argparse.Namespace) -> int:
    if not args.question.strip():
        raise ValueError("the question is empty.")
    require("transformers", "safetensors", "tqdm", requirement="'linattn[hf]'")
    from ..serve import snapshots
    from ..serve.local import answer, saved_choice
    from ..serve.sampling import SamplingOptions
    from .model_options import load_choice
    from .models import check_model

    choice, context = saved_choice(args.state)
    choice = replace(choice, model=args.model or choice.model)
    if args.model is None and not Path(choice.model).exists() and choice.model not in MODELS:
        raise ValueError(f"the model that read it, {choice.model}, is not there: name it by --model.")
    check_model(choice.model)
    model = load_choice(choice, args.context or context, args.threads)
    snapshot = snapshots.load(args.state, model.new_cache(), model.fingerprint)
    options = SamplingOptions(max_tokens=args.tokens, temperature=args.temperature, seed=args.seed)
    for piece in answer(model, snapshot, args.question, options):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0
