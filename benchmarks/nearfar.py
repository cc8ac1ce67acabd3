"""Near/far attention beside torch's own: a causal forward pass by length, and one token after a long past.

python benchmarks/nearfar.py [--lengths 2048 8192 32768] [--json out/nearfar.json]
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import linattn
from linattn.measure.machine import machine

HEADS, DIM, PAST = 8, 64, 16384


def least(work, seconds: float = 1.0) -> float:
    """The shortest of the runs that fit into some time, at least three, after one to warm up."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def tokens(count: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, count, DIM) for _ in range(3)]


@torch.inference_mode()
def forward(kernel: linattn.NearFar, length: int) -> dict[str, float]:
    q, k, v = tokens(length)
    ours = least(lambda: linattn.attention(q, k, v, kernel=kernel, is_causal=True))
    theirs = least(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    return {"tokens": length, "near_far_ms": 1e3 * ours, "sdpa_ms": 1e3 * theirs, "ratio": ours / theirs}


@torch.inference_mode()
def step(kernel: linattn.NearFar) -> dict[str, float]:
    """64 tokens one by one, so that the merge of a block is part of the figure."""
    _, state = linattn.attention(*tokens(2048), kernel=kernel, is_causal=True, return_state=True)
    new = tokens(kernel.block)

    def walk() -> None:
        now = state
        for t in range(kernel.block):
            one = (x[:, :, t : t + 1] for x in new)
            _, now = linattn.attention(*one, kernel=kernel, is_causal=True, state=now, return_state=True)

    ours = least(walk) / kernel.block
    q, k, v = torch.randn(1, HEADS, 1, DIM), *tokens(PAST)[:2]
    theirs = least(lambda: scaled_dot_product_attention(q, k, v))
    return {"near_far_us": 1e6 * ours, "sdpa_us": 1e6 * theirs, "times_faster": theirs / ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    kernel, about = linattn.NearFar(), machine()
    print(
        f"{kernel}; {HEADS} heads, dim {DIM}, float32; torch {about['torch']}, {about['processor']}, {about['threads']} threads"
    )
    rows = []
    for length in args.lengths:
        rows.append(forward(kernel, length))
        print(
            "{tokens:>6} tokens  near/far {near_far_ms:8.1f} ms  SDPA {sdpa_ms:8.1f} ms  ratio {ratio:.3f}".format(
                **rows[-1]
            )
        )
    one = step(kernel)
    print(
        "one token      near/far {near_far_us:8.0f} us  SDPA on {past} {sdpa_us:.0f} us: 1/{times_faster:.1f}".format(
            past=PAST, **one
        )
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": about, "forward": rows, "step": one}, indent=1))


if __name__ == "__main__":
    main()
