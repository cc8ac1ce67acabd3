"""`linattn generate`: a pretrained model continues a long prompt with a bounded cache."""

import argparse
import sys
import time
from typing import Any

from .._commandline import real, require, seed, whole, words
from .model_options import add_nearfar_options, nearfar_choice
from .models import HELP, add_dtype, check_model, load_model, read_text
from .progress import progress

LEAST_TEMPERATURE = 1e-6  # logits divided by less may overflow
CHUNK = 512  # tokens of the prompt that are read at once
EXAMPLES = """examples:
  linattn generate --model smollm2 --prompt "Once upon a time"
  linattn generate --model smollm2 --prompt-file README.md --tokens 50 --temperature 0.8
  linattn generate --model smollm2 --prompt-file README.md --exact      the model's own attention, to compare
  linattn generate --model qwen3-next-folder --prompt-file README.md --dtype bfloat16
In a hybrid model the linear layers go to the engine, and softmax layers keep their attention unless an option of near/far
asks for it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--model", required=True, help=HELP)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a text file")
    source.add_argument("--prompt", type=words, metavar="TEXT", help="the prompt itself")
    parser.add_argument("--tokens", type=whole(), default=200, metavar="N", help="how many to write")
    parser.add_argument(
        "--length", type=whole(), metavar="N", help="read only the prompt's first N tokens (default: all)"
    )
    parser.add_argument(
        "--temperature", type=real(0, most=1e4), default=0.0, help="of sampling; 0 always takes the likeliest token"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of sampling")
    add_nearfar_options(parser)
    add_dtype(parser)
    parser.add_argument("--exact", action="store_true", help="the model's own attention and cache, to compare")


def run(args: argparse.Namespace) -> int:
    check_model(args.model)
    text = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
    if not text:
        raise ValueError("--prompt is empty.")
    if 0 < args.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"--temperature must be 0 or at least {LEAST_TEMPERATURE:g}, got {args.temperature:g}.")
    require("transformers", requirement="'linattn[hf]'")
    import torch
    from transformers import TextStreamer

    from .. import hf
    from ..hf import fidelity
    from ..hf.hybrids.layers import linear_layers
    from ..hf.nearfar_choice import NearFarChoice

    near_far = nearfar_choice(args)
    if args.exact and near_far != NearFarChoice():
        raise ValueError("--exact keeps the model's own attention: it goes with no option of near/far.")
    model, tokenizer = load_model(args.model, args.dtype)
    if not model.can_generate():
        raise ValueError(f"{args.model} is an encoder and cannot generate text.")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.length]
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens.")
    choice = None if args.exact else _choice(model, near_far, ids.shape[1] + args.tokens)
    if choice is not None:
        hf.attach(model, choice[0])
        if linear_layers(model):
            print(hf.describe(model), file=sys.stderr)
    cache: Any = fidelity.new_cache(model, choice)
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    if cache is not None:
        _read(model, ids, cache)
    middle = time.perf_counter()
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature > 0 else {"do_sample": False}
    sampling |= {} if cache is None else {"past_key_values": cache}
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    out = model.generate(ids, max_new_tokens=args.tokens, streamer=streamer, **sampling)
    end = time.perf_counter()
    print(_summary(ids.shape[1], out.shape[1] - ids.shape[1], middle - start, end - middle, cache), file=sys.stderr)
    return 0


def _choice(model: Any, near_far: Any, length: int) -> Any:
    """What the softmax layers get, as linattn.hf.fidelity has it: near/far if asked for, or if there is nothing else to do."""
    from ..hf.hybrids.layers import linear_layers

    if near_far == type(near_far)() and linear_layers(model):
        return None, None
    return near_far.kernels(model, length), None


def _read(model: Any, ids: Any, cache: Any) -> None:
    """All tokens of the prompt but the last, in pieces."""
    import torch

    starts = range(0, ids.shape[1] - 1, CHUNK)
    with torch.no_grad():  # as generate does: what it writes into a cache may not come from inference mode
        for label in progress([f"{i} tokens read" for i in starts]):
            i = int(label.split()[0])
            model(ids[:, i : min(i + CHUNK, ids.shape[1] - 1)], past_key_values=cache, logits_to_keep=1)


def _summary(read: int, written: int, reading: float, writing: float, cache: Any) -> str:
    if cache is None:  # the model read the prompt inside of generate
        return f"{read} tokens read and {written} written in {writing:.1f} s"
    from ..hf import fidelity

    return (
        f"{read} tokens read at {read / max(1e-9, reading):.0f}/s, {written} written at "
        f"{written / max(1e-9, writing):.1f}/s, cache {fidelity.cache_bytes(cache) / 2**20:.1f} MiB"
    )
