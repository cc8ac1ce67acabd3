"""Where the processor time of a decoded token goes: matrix products, native calls, Python around them, the rest of the model.

    python benchmarks/token_parts.py                         SmolLM2-135M with near/far after 2048 tokens
    python benchmarks/token_parts.py --model Qwen3-Next      a small hybrid with random weights, see hybrid_models.py
    python benchmarks/token_parts.py --lines 20              also the lines of linattn that take most

A timer of processor time interrupts the run every few milliseconds and notes the line that is being executed; the time of
a call into C belongs to the line that made it. Nothing is instrumented, so Python is not made slower than it is.
"""

import argparse
import collections
import linecache
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hybrid_models
from linattn import hf
from linattn.hf import weights

CHUNK = 512
# A line of linattn that enters the native library.
NATIVE = re.compile(r"\blibrary\.\w+\(|entry\(|\(\)\(ctypes")
PARTS = (
    "matrix products",
    "native calls of linattn",
    "Python of linattn",
    "torch's operators in linattn",
    "the rest of the model",
)
OPERATOR = re.compile(r"\.(new_empty|empty_like|contiguous|transpose|to|reshape|view|unsqueeze|float)\(|torch\.\w+\(")


class Samples:
    """Lines that were being executed, counted at even steps of processor time."""

    def __init__(self, interval: float = 0.001):
        self.lines: collections.Counter[tuple[str, int]] = collections.Counter()
        self.interval = interval

    def _note(self, _: int, frame: FrameType | None) -> None:
        if frame is not None:
            self.lines[frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno] += 1

    def of(self, run: Callable[[], object]) -> None:
        before = signal.signal(signal.SIGPROF, self._note)
        signal.setitimer(signal.ITIMER_PROF, self.interval, self.interval)
        try:
            run()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)


def part_of(file: str, line: int) -> str:
    """Which of PARTS a line belongs to."""
    if file.endswith("nn/modules/linear.py"):
        return PARTS[0]
    if "/linattn/" in file:
        text = linecache.getline(file, line)
        if NATIVE.search(text):
            return PARTS[1]
        return PARTS[3] if OPERATOR.search(text) else PARTS[2]
    return PARTS[4]


@torch.inference_mode()
def smollm2(args: argparse.Namespace) -> Callable[[], object]:
    """A function that writes a token after a text, with near/far."""
    model: Any
    model, tokenizer = weights.load("smollm2")
    if args.calibration:
        hf.attach(model, hf.Calibration.load(args.calibration).kernels())
    else:
        hf.attach(model, "nearfar", mean_slots=216)
    ids, cache = weights.encode(tokenizer, args.text, args.length), hf.StateCache(model)
    for chunk in ids.split(CHUNK, dim=1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    return lambda: model(ids[:, -1:], past_key_values=cache, logits_to_keep=1)


@torch.inference_mode()
def hybrid(args: argparse.Namespace) -> Callable[[], object]:
    """The same of a hybrid, attached."""
    _, model = hybrid_models.build(args.model)
    return hybrid_models.write(model, torch.randint(3, 1000, (1, args.length)), tokens=1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=["smollm2", *hybrid_models.FAMILIES], metavar="MODEL")
    parser.add_argument("--text", type=Path, default=Path("out/texts/fresh-prose.txt"), help="default %(default)s")
    parser.add_argument("--length", type=int, default=2048, help="tokens before (default %(default)s)")
    parser.add_argument("--calibration", metavar="FOLDER", help="budgets of near/far (default: found or measured)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of processor time (default %(default)s)")
    parser.add_argument("--lines", type=int, default=0, help="of linattn to print (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    step = smollm2(args) if args.model == "smollm2" else hybrid(args)
    for _ in range(3):
        step()
    samples, tokens, begun = Samples(), 0, time.process_time()

    def write() -> None:
        nonlocal tokens
        while time.process_time() - begun < args.seconds:
            step()
            tokens += 1

    samples.of(write)
    spent, count = (time.process_time() - begun) / tokens, samples.lines.total()
    shares: collections.Counter[str] = collections.Counter()
    for place, times in samples.lines.items():
        shares[part_of(*place)] += times
    print(f"{args.model} after {args.length} tokens, one thread: {1000 * spent:.2f} ms of processor time a token\n")
    print("| part | share | milliseconds |\n| --- | --- | --- |")
    for part in PARTS:
        print(f"| {part} | {shares[part] / count:.1%} | {1000 * spent * shares[part] / count:.2f} |")
    ours = [(times, place) for place, times in samples.lines.items() if "/linattn/" in place[0]]
    for times, (file, line) in sorted(ours, reverse=True)[: args.lines]:
        text = linecache.getline(file, line).strip()
        print(f"{times / count:7.2%}  {file.rpartition('/linattn/')[2]}:{line}: {text}")


if __name__ == "__main__":
    main()
