"""Near/far attention beside torch's own: a causal forward pass by length, one token after a long past, recall, and memory."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

import linattn
from linattn.engines import describe
from registry import Row, Settings, case
from timer import seconds

HEADS, DIM, PAST = 8, 64, 16384
TORCH_UP_TO = 8192  # tokens; beyond, only the native engine is timed
BARS = {2048: 0.6, 32768: 0.06}  # of SDPA's time
# Of a layer of SmolLM2-135M, 3 kv heads: one head that recalls as calibration gives it, and all three.
RECALLS = {
    "1 of 3 heads, 64 blocks": [64, 0, 0],
    "3 of 3 heads, 16 blocks": [16] * 3,
    "3 of 3 heads, 64 blocks": [64] * 3,
}
RECALL_BAR = 1.5  # times the time without recall


def tokens(count: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, count, DIM) for _ in range(3)]


def engines() -> list[str]:
    return ["native", "torch"] if describe()["native"].startswith("available") else ["torch"]


def memory_of_own_process(script: str, call: str) -> float | None:
    """MiB that a call takes after a script, in a process of its own; None where that cannot be measured."""
    script = f"import torch, linattn\n{script}print(linattn.measure.peak_memory(lambda: {call}) or '')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout) / 2**20 if done.stdout.strip() else None


@case("near/far")
@torch.inference_mode()
def forward(settings: Settings) -> Iterator[Row]:
    """Causal forward pass of NearFar(), merging included, as a share of SDPA's time."""
    kernel = linattn.NearFar()
    for length in (1024, 2048) if settings.quick else (1024, 2048, 4096, 8192, 16384, 32768):
        q, k, v = tokens(length)
        names = [name for name in engines() if name == "native" or length <= TORCH_UP_TO]
        calls: dict[str, Callable[[], object]] = {
            name: lambda e=name, q=q, k=k, v=v: linattn.attention(q, k, v, kernel=kernel, is_causal=True, engine=e)
            for name in names
        }
        calls["sdpa"] = lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True)
        best = seconds(calls, least=3 if length < 32768 else 1, budget=settings.budget / 3)
        for name in names:
            bar = BARS.get(length) if name == "native" else None
            yield Row(f"causal forward, {name}, N = {length}", best[name] / best["sdpa"], "of SDPA", bar, False)


@case("near/far training")
def training(settings: Settings) -> Iterator[Row]:
    """Causal forward and backward pass of NearFar(): the native engine beside the torch engine, and beside SDPA."""
    kernel = linattn.NearFar()

    def passes(
        attend: Callable[..., torch.Tensor], leaves: list[torch.Tensor], way: torch.Tensor
    ) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, way)

    for length in (1024,) if settings.quick else (2048, 4096, 8192, 16384):
        leaves, way = [x.requires_grad_() for x in tokens(length)], torch.randn(1, HEADS, length, DIM)
        names = [name for name in engines() if name == "native" or length <= TORCH_UP_TO]
        calls = {
            name: passes(
                lambda q, k, v, e=name: linattn.attention(q, k, v, kernel=kernel, is_causal=True, engine=e), leaves, way
            )
            for name in names
        }
        calls["sdpa"] = passes(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), leaves, way)
        best = seconds(calls, least=2, budget=settings.budget / 2)
        for name in names:
            yield Row(f"forward and backward, {name}, N = {length}", best[name] / best["sdpa"], "of SDPA")
        if len(names) == 2:
            yield Row(
                f"forward and backward, torch / native, N = {length}", best["torch"] / best["native"], "times", 3.0
            )


@case("near/far training memory", slow=True)
def training_memory(settings: Settings) -> Iterator[Row]:
    """MiB that a causal forward and backward pass takes, in a process of its own."""
    for engine in engines():
        for length in (4096, 8192) if engine == "torch" else (8192, 16384, 32768):
            script = (
                f"tokens = lambda n: [torch.randn(1, {HEADS}, n, {DIM}).requires_grad_() for _ in range(3)]\n"
                f"options = {{'kernel': 'nearfar', 'is_causal': True, 'engine': {engine!r}}}\n"
                "def passes(x):\n"
                "    return torch.autograd.grad(linattn.attention(*x, **options).sum(), x)\n"
                "passes(tokens(1024))\n"
                f"leaves = tokens({length})\n"
            )
            taken = memory_of_own_process(script, "passes(leaves)")
            if taken is not None:
                yield Row(f"forward and backward, {engine}, N = {length}", taken, "MiB")


@case("near/far decode")
@torch.inference_mode()
def decode(settings: Settings) -> Iterator[Row]:
    """One token after 2048, averaged over a block so that its merge is part of the figure."""
    kernel = linattn.NearFar()
    options = {"kernel": kernel, "is_causal": True, "return_state": True}
    _, state = linattn.attention(*tokens(2048), **options)
    block = [[x[:, :, t : t + 1].contiguous() for x in tokens(kernel.block)] for t in range(kernel.block)]

    def one_by_one(engine: str) -> None:
        now = state
        for one in block:
            _, now = linattn.attention(*one, state=now, engine=engine, **options)

    q, k, v = torch.randn(1, HEADS, 1, DIM), *tokens(PAST)[:2]
    calls: dict[str, Callable[[], object]] = {name: lambda e=name: one_by_one(e) for name in engines()}
    calls["sdpa"] = lambda: scaled_dot_product_attention(q, k, v)
    best = seconds(calls, least=20, budget=settings.budget / 3)
    for name in engines():
        time = best[name] / kernel.block
        yield Row(f"one token, {name}", time * 1e6, "microseconds")
        bar = 1 / 15 if name == engines()[0] else None
        yield Row(f"one token, {name}, beside SDPA on {PAST} tokens", time / best["sdpa"], "of SDPA", bar, False)


def recalling(recall: list[int], slots: list[int] | int = 192) -> linattn.NearFar:
    return linattn.NearFar(slots=slots, recall=recall, recall_bits=8, state_bits=8)


def same_memory(kernel: linattn.NearFar, length: int) -> linattn.NearFar:
    """Without recall: heads that recall get as many more slots as take the memory of their far tokens."""
    more = kernel.recall_price(length, DIM, DIM)
    return recalling([0] * 3, [192 + more if blocks else 192 for blocks in kernel.recalls(3)])


def grouped(count: int) -> list[torch.Tensor]:
    """Tokens of 9 query heads and 3 kv heads."""
    return [torch.randn(1, heads, count, DIM) for heads in (9, 3, 3)]


@case("near/far recall")
@torch.inference_mode()
def recall(settings: Settings) -> Iterator[Row]:
    """Reading with recall and one token after it, as multiples of the time of as many slots, and of as much memory (8 bits)."""
    length = 1024 if settings.quick else 8192
    q, k, v = grouped(length)
    block = [[x[:, :, t : t + 1].contiguous() for x in grouped(64)] for t in range(64)]
    options = {"is_causal": True, "enable_gqa": True}
    kernels = {"none": recalling([0, 0, 0]), **{name: recalling(blocks) for name, blocks in RECALLS.items()}}
    equal = {name: f"memory of {name}" for name in RECALLS}
    kernels |= {equal[name]: same_memory(kernels[name], length) for name in RECALLS}
    reading: dict[str, Callable[[], object]] = {
        name: lambda kernel=kernel: linattn.attention(q, k, v, kernel=kernel, **options)
        for name, kernel in kernels.items()
    }
    states = {
        name: linattn.attention(q, k, v, kernel=kernel, return_state=True, **options)[1]
        for name, kernel in kernels.items()
    }

    def one_by_one(name: str) -> None:
        for one in block:
            _, states[name] = linattn.attention(
                *one, kernel=kernels[name], state=states[name], return_state=True, **options
            )

    writing: dict[str, Callable[[], object]] = {name: lambda name=name: one_by_one(name) for name in kernels}
    for what, calls in (("recall reading", reading), ("recall one token", writing)):
        best = seconds(calls, least=5, budget=settings.budget / 2, clock=time.process_time)
        for name in RECALLS:
            yield Row(f"{what} vs none, N = {length}, {name}", best[name] / best["none"], "times", RECALL_BAR, False)
            ratio = best[name] / best[equal[name]]
            yield Row(f"{what} vs slots of the same memory, N = {length}, {name}", ratio, "times", RECALL_BAR, False)


@case("near/far memory")
def memory(settings: Settings) -> Iterator[Row]:
    """MiB that a call without a causal mask takes, in a process of its own."""
    for engine in engines():
        script = (
            f"q, k, v = (torch.randn(1, {HEADS}, {PAST}, {DIM}) for _ in range(3))\n"
            f"options = {{'kernel': 'nearfar', 'engine': {engine!r}}}\n"
            "linattn.attention(*(x[:, :, :1024] for x in (q, k, v)), **options)\n"
        )
        taken = memory_of_own_process(script, "linattn.attention(q, k, v, **options)")
        if taken is not None:
            yield Row(f"{PAST} tokens without a causal mask, {engine} engine", taken, "MiB", 922.0, False)
