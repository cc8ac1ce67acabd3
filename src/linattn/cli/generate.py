"""`linattn generate`: a pretrained model goes on with a long prompt, in memory that does not grow."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from .progress import progress

CHUNK = 512  # tokens of the prompt that are read at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a model folder, a GGUF file or smollm2")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-file", metavar="FILE")
    source.add_argument("--prompt", metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=200, help="to write (default 200)")
    parser.add_argument("--length", type=int, help="read only so many tokens of the prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is always the likeliest token (default)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--calibration", metavar="FOLDER", help="budgets that were saved there")
    parser.add_argument("--exact", action="store_true", help="the model's own attention and cache, to compare")


def run(args: argparse.Namespace) -> int:
    if args.prompt_file is not None and not Path(args.prompt_file).is_file():
        raise SystemExit(f"linattn generate: there is no file {args.prompt_file}.")
    import torch
    from transformers import DynamicCache, TextStreamer

    from .. import hf
    from ..hf import fidelity, weights
    from ..nearfar import NearFar

    model: Any
    model, tokenizer = weights.load(args.model)
    text = args.prompt if args.prompt is not None else Path(args.prompt_file).read_text(errors="replace")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.length]
    if not args.exact:
        found = hf.Calibration.load(args.calibration) if args.calibration else None
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
