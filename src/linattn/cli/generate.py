"""`linattn generate`: a pretrained model continues a long prompt with a bounded cache."""

import argparse
import sys
import time
from typing import Any

from .._commandline import real, require, seed, whole
from .models import HELP, check_model, load_model, read_text
from .progress import progress

CHUNK = 512  # tokens of the prompt that are read at once
EXAMPLES = """examples:
  linattn generate --model smollm2 --prompt "Once upon a time"
  linattn generate --model smollm2 --prompt-file README.md --tokens 50 --temperature 0.8
  linattn generate --model smollm2 --prompt-file README.md --exact      the model's own attention, to compare
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--model", required=True, help=HELP)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a text file")
    source.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    parser.add_argument("--tokens", type=whole(), default=200, metavar="N", help="how many to write")
    parser.add_argument(
        "--length", type=whole(), metavar="N", help="read only the prompt's first N tokens (default: all)"
    )
    parser.add_argument(
        "--temperature", type=real(0, most=1e4), default=0.0, help="of sampling; 0 always takes the likeliest token"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of sampling")
    parser.add_argument(
        "--window", type=whole(0), default=128, metavar="N", help="last tokens that are attended exactly"
    )
    parser.add_argument(
        "--slots", type=whole(0), default=128, metavar="N", help="slots of each head for farther tokens"
    )
    parser.add_argument(
        "--calibration", metavar="FOLDER", help="use the budgets saved there (default: --slots everywhere)"
    )
    parser.add_argument("--exact", action="store_true", help="the model's own attention and cache, to compare")


def run(args: argparse.Namespace) -> int:
    check_model(args.model)
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
    if not text:
        raise ValueError("--prompt is empty.")
    require("transformers", requirement="'linattn[hf]'")
    import torch
    from transformers import DynamicCache, TextStreamer

    from .. import hf
    from ..hf import fidelity
    from ..nearfar import NearFar

    found = hf.Calibration.load(args.calibration) if args.calibration else None
    model, tokenizer = load_model(args.model)
    if not model.can_generate():
        raise ValueError(f"{args.model} is an encoder and cannot generate text.")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.length]
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens.")
    if not args.exact:
        hf.attach(model, found.kernels() if found else NearFar(args.window, args.slots))
    cache: Any = DynamicCache(config=model.config) if args.exact else hf.StateCache(model)
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    starts = range(0, ids.shape[1] - 1, CHUNK)
    with torch.inference_mode():
        for label in progress([f"{i} tokens read" for i in starts]):
            i = int(label.split()[0])
            model(ids[:, i : min(i + CHUNK, ids.shape[1] - 1)], past_key_values=cache, logits_to_keep=1)
    middle = time.perf_counter()
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature > 0 else {"do_sample": False}
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=args.tokens, streamer=streamer, **sampling)
    end = time.perf_counter()
    new = out.shape[1] - ids.shape[1]
    print(
        f"{ids.shape[1]} tokens read at {ids.shape[1] / max(1e-9, middle - start):.0f}/s, {new} written at "
        f"{new / max(1e-9, end - middle):.1f}/s, cache {fidelity.cache_bytes(cache) / 2**20:.1f} MiB",
        file=sys.stderr,
    )
    return 0
