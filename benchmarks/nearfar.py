"""Near/far attention beside torch's own: a causal forward pass by length, one token after a long past, and memory.

python benchmarks/nearfar.py [--lengths 2048 8192 32768] [--threads 1] [--json out/nearfar.json]

All candidates take turns and the best time of each counts. Merging is part of every figure. With --cpu one thread's processor
time is measured instead of the clock on the wall: for a machine that others use too.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import clocks
import linattn
from linattn.engines import describe
from linattn.measure.machine import machine

HEADS, DIM, PAST, LONG = 8, 64, 16384, 32768
TORCH_UP_TO = 8192  # tokens; beyond, only the native engine is timed, where there is one


Timing = dict[str, Any]  # arguments of clocks.seconds


def tokens(count: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, count, DIM) for _ in range(3)]


def engines() -> list[str]:
    return ["native", "torch"] if describe()["native"].startswith("available") else ["torch"]


@torch.inference_mode()
def forward(kernel: linattn.NearFar, length: int, timing: Timing) -> dict[str, float]:
    q, k, v = tokens(length)

    def call(engine: str) -> Callable[[], object]:
        return lambda: linattn.attention(q, k, v, kernel=kernel, is_causal=True, engine=engine)

    candidates = {name: call(name) for name in engines() if name == "native" or length <= TORCH_UP_TO}
    candidates["sdpa"] = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    best = clocks.seconds(candidates, least=3 if length < LONG else 1, **timing)
    return {"tokens": length, **{f"{name}_ms": 1e3 * t for name, t in best.items()}}


@torch.inference_mode()
def step(kernel: linattn.NearFar, timing: Timing) -> dict[str, float]:
    """A block of tokens one by one, so that its merge is part of the figure."""
    _, state = linattn.attention(*tokens(2048), kernel=kernel, is_causal=True, return_state=True)
    block = [[x[:, :, t : t + 1].contiguous() for x in tokens(kernel.block)] for t in range(kernel.block)]

    def walk(engine: str) -> Callable[[], object]:
        def one_by_one() -> None:
            now = state
            options = {"kernel": kernel, "is_causal": True, "return_state": True, "engine": engine}
            for one in block:
                _, now = linattn.attention(*one, state=now, **options)

        return one_by_one

    q, k, v = torch.randn(1, HEADS, 1, DIM), *tokens(PAST)[:2]
    candidates: dict[str, Callable[[], object]] = {name: walk(name) for name in engines()}
    candidates["sdpa"] = lambda: scaled_dot_product_attention(q, k, v)
    best = clocks.seconds(candidates, least=20, **timing)
    return {f"{name}_us": 1e6 * (t if name == "sdpa" else t / kernel.block) for name, t in best.items()}


def memory(engine: str) -> float:
    """MiB that a call without a causal mask adds to the largest size of a process of its own."""
    script = (
        "import resource, sys, torch, linattn\n"
        f"q, k, v = (torch.randn(1, {HEADS}, {PAST}, {DIM}) for _ in range(3))\n"
        "size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "with torch.inference_mode():\n"
        f"    linattn.attention(*(x[:, :, :1024] for x in (q, k, v)), engine={engine!r})\n"
        "    before = size()\n"
        f"    linattn.attention(q, k, v, engine={engine!r})\n"
        "print(size() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def bar(what: str, figure: float, most: float) -> dict[str, object]:
    verdict = "met" if figure <= most else "MISSED"
    print(f"{what:72} {figure:9.3g}   bar <= {most:.3g}   {verdict}", flush=True)
    return {"what": what, "figure": figure, "bar": most, "met": figure <= most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, LONG])
    parser.add_argument("--threads", type=int, help="for torch and the native engine; torch's own number if not given")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for each row")
    parser.add_argument("--cpu", action="store_true", help="processor time of one thread instead of wall time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.threads or args.cpu:
        torch.set_num_threads(1 if args.cpu else args.threads)
    timing: Timing = {"budget": args.budget, "clock": time.process_time if args.cpu else time.perf_counter}
    kernel, about = linattn.NearFar(), machine()
    about["threads"] = torch.get_num_threads()
    clock = "processor time" if args.cpu else "wall time"
    print(f"{kernel}; {HEADS} heads, dim {DIM}, float32; {clock}")
    print(f"torch {about['torch']}, {about['processor']}, {about['threads']} threads")
    best, rows, bars = engines()[0], [], []
    for length in args.lengths:
        row = forward(kernel, length, timing)
        shown = "  ".join(f"{name[:-3]} {row[name]:9.1f} ms" for name in row if name.endswith("_ms"))
        ratio = row[f"{best}_ms"] / row["sdpa_ms"]
        rows.append({**row, "ratio": ratio})
        print(f"{length:>6} tokens  {shown}  {best} / sdpa {ratio:.3f}", flush=True)
    one = step(kernel, timing)
    print("one token      " + "  ".join(f"{name[:-3]} {t:9.1f} us" for name, t in one.items()), flush=True)
    held = {name: memory(name) for name in engines()}
    ratios = {row["tokens"]: row["ratio"] for row in rows}
    if 2048 in ratios:
        bars.append(bar("causal forward at 2048 tokens, of SDPA's time", ratios[2048], 1.0))
    if LONG in ratios:
        bars.append(bar(f"causal forward at {LONG} tokens, of SDPA's time", ratios[LONG], 0.08))
    bars.append(bar(f"one token, of SDPA's time on {PAST} tokens", one[f"{best}_us"] / one["sdpa_us"], 1 / 15))
    for name, size in held.items():
        bars.append(bar(f"MiB that {PAST} tokens without a causal mask take, {name} engine", size, 0.9 * 1024))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": about, "forward": rows, "step": one, "memory": held, "bars": bars}
        args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
