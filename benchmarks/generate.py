"""Generation after a long prompt: tokens per second and memory of the process, exact and near/far.

    python benchmarks/generate.py --text LONG.txt [--length 8192] [--tokens 2000] [--calibration FOLDER]

Exact is the model's own attention with transformers' DynamicCache. Each runs in its own process, so that memory can be
compared; both use `model.generate`. Speed is given in wall time and in processor time, which other processes disturb less.
"""

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from linattn import NearFar, hf
from linattn.hf import fidelity, weights
from linattn.measure.machine import machine

CHUNK = 512  # tokens of the prompt that are read at once


def resident() -> float:
    """MiB of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch(BaseStreamer):
    """Notes clocks and size every so many tokens."""

    def __init__(self, every: int):
        self.every, self.count, self.marks = every, -1, []  # generate hands over the prompt first

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count % self.every == 1 or self.every == 1:
            self.marks.append((self.count, time.perf_counter(), time.process_time(), resident()))

    def end(self) -> None:
        self.marks.append((self.count, time.perf_counter(), time.process_time(), resident()))


def choices(args: argparse.Namespace) -> dict[str, Any]:
    """Name -> kernels for `attach`; None is exact. "same slots": those of "with recall", without the recall itself."""
    found: dict[str, Any] = {"exact": None, "near/far": NearFar(args.window, args.slots)}
    if args.calibration:
        calibration = hf.Calibration.load(args.calibration)
        mean = args.mean or round(calibration.mean_slots)
        found["near/far"] = calibration.with_mean(mean, recall=False).kernels()
        recalling = calibration.with_mean(mean)
        if any(any(row) for row in recalling.recall.values()):
            found["with recall"] = recalling.kernels()
            plain = calibration.near_far()
            found["same slots"] = {layer: plain.with_slots(row, 0) for layer, row in recalling.budgets.items()}
    return found


def run(name: str, args: argparse.Namespace, results: Any) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    model: Any
    model, tokenizer = weights.load(args.model)
    ids = weights.encode(tokenizer, args.text, args.length)
    kernel = choices(args)[name]
    if kernel is not None:
        hf.attach(model, kernel)
    cache: Any = DynamicCache(config=model.config) if kernel is None else hf.StateCache(model)
    begun = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        for i in range(0, args.length - 1, CHUNK):
            model(ids[:, i : min(i + CHUNK, args.length - 1)], past_key_values=cache, logits_to_keep=1)
    read = time.perf_counter() - begun[0], time.process_time() - begun[1]
    watch = Watch(max(1, args.tokens // 8))
    options = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "do_sample": False}
    model.generate(ids, past_key_values=cache, streamer=watch, **options)
    first, last = watch.marks[0], watch.marks[-1]
    written = last[0] - first[0]
    results.put(
        {
            "attention": name,
            "read_per_second": args.length / read[0],
            "read_per_cpu_second": args.length / read[1],
            "written_per_second": written / (last[1] - first[1]),
            "written_per_cpu_second": written / (last[2] - first[2]),
            "cache_mib": fidelity.cache_bytes(cache) / 2**20,
            "resident_mib": [{"tokens": mark[0], "mib": mark[3]} for mark in watch.marks],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, required=True, help="the prompt is its first tokens")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=2000, help="to write")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--calibration", metavar="FOLDER", help="budgets that were saved there")
    parser.add_argument("--mean", type=int, help="hand its slots out again to this mean")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of exact, near/far, 'with recall' and 'same slots'")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context, rows = multiprocessing.get_context("spawn"), []
    about = machine()
    print(f"{args.model}: {args.tokens} tokens after {args.length}; torch {about['torch']}, {about['processor']}")
    for name in args.only or choices(args):
        results = context.SimpleQueue()
        process = context.Process(target=run, args=(name, args, results))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name} failed.")
        row = results.get()
        rows.append(row)
        sizes = " ".join(f"{mark['mib']:.0f}" for mark in row["resident_mib"])
        print(
            f"{name:12} read {row['read_per_second']:6.0f}/s (processor {row['read_per_cpu_second']:.0f}), written "
            f"{row['written_per_second']:5.1f}/s (processor {row['written_per_cpu_second']:.1f}), cache "
            f"{row['cache_mib']:.1f} MiB, process {sizes} MiB",
            flush=True,
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        setting = {name: str(x) for name, x in vars(args).items()}
        args.json.write_text(json.dumps({"machine": about, "setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
