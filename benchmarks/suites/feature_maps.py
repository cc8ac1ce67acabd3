"""Kernels with feature maps: rates, softmax beside them, one-token decoding, growth with the length."""

import ctypes
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import linattn
from linattn.engines.native import plans
from linattn.engines.native.decode import DecodePlan
from linattn.engines.native.ffi import library
from linattn.kernels import Positive
from linattn.measure import peak_memory
from linattn.measure.flops import both, forward
from linattn.states.base import pack_of
from registry import Row, Settings, case
from timer import matmul_rate, seconds

HEADS, DIM = 8, 64
Tokens = tuple[Tensor, Tensor, Tensor]


def tokens(length: int, heads: int = HEADS, grad: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, DIM, generator=generator).requires_grad_(grad) for _ in range(3))
    return q, k, v


def attend(x: Tokens, kernel: linattn.kernels.Kernel, is_causal: bool, engine: str = "native") -> Tensor:
    return linattn.attention(*x, kernel=kernel, is_causal=is_causal, engine=engine)


def train(function: Callable[[Tokens], Tensor], x: Tokens, grad: Tensor) -> None:
    torch.autograd.grad(function(x), x, grad)


@case("feature maps")
def rates(settings: Settings) -> Iterator[Row]:
    """Necessary FLOPs per second, as a share of torch's own 2048^3 matrix product in the same run."""
    for features in (128, 256):
        kernel = Positive(DIM, features=features)
        for length in (512,) if settings.quick else (4096, 16384):
            x, xg, ones = tokens(length), tokens(length, grad=True), torch.ones(1, HEADS, length, DIM)
            forward_calls = {
                "full forward": lambda x=x, kernel=kernel: attend(x, kernel, False),
                "causal forward": lambda x=x, kernel=kernel: attend(x, kernel, True),
            }
            training = {
                "causal forward + backward": lambda x=xg, kernel=kernel, ones=ones: train(
                    lambda y: attend(y, kernel, True), x, ones
                )
            }
            for calls in (forward_calls, training):  # each beside the product: turns are as long as the slowest call
                best, peak = matmul_rate(calls, settings.budget)
                for name, time in best.items():
                    yield from _rate(name, time, peak, (HEADS, length, DIM, DIM, features))


def _rate(name: str, time: float, peak: float, sizes: tuple[int, int, int, int, int]) -> Iterator[Row]:
    where = f"r = {sizes[4]}, N = {sizes[1]}"
    if "backward" not in name:
        bar = {"full forward": 0.90, "causal forward": 0.75}[name]
        yield Row(f"{name}, {where}", forward(*sizes) / time / peak, "of matmul rate", bar)
        return
    yield Row(f"{name}, {where}", both(*sizes) / time / peak, "of matmul rate", 0.60)
    bare = both(*sizes, again=False) / time / peak
    yield Row(f"  the same without recomputation, {where}", bare, "of matmul rate")


@case("softmax")
def against_softmax(settings: Settings) -> Iterator[Row]:
    """Times faster than torch's scaled_dot_product_attention, r = 128; and than the torch engine."""
    length, kernel = 1024 if settings.quick else 16384, Positive(DIM, features=128)
    x, xg, ones = tokens(length), tokens(length, grad=True), torch.ones(1, HEADS, length, DIM)
    for is_causal, bar in ((False, 70.0), (True, 22.0)):
        name = "causal" if is_causal else "full"
        best = seconds(
            {
                "sdpa": lambda c=is_causal: sdpa(*x, is_causal=c),
                "native": lambda c=is_causal: attend(x, kernel, c),
                "torch": lambda c=is_causal: attend(x, kernel, c, "torch"),
            },
            budget=settings.budget,
            least=2,
        )
        yield Row(f"SDPA / native, {name}, N = {length}", best["sdpa"] / best["native"], "times", bar)
        yield Row(f"torch engine / native, {name}, N = {length}", best["torch"] / best["native"], "times")
    best = seconds(
        {
            "sdpa": lambda: train(lambda y: sdpa(*y, is_causal=True), xg, ones),
            "native": lambda: train(lambda y: attend(y, kernel, True), xg, ones),
        },
        budget=settings.budget,
        least=1,
    )
    ratio = best["sdpa"] / best["native"]
    yield Row(f"SDPA / native, causal forward + backward, N = {length}", ratio, "times", 15.0)


@case("crossover")
def crossover(settings: Settings) -> Iterator[Row]:
    """The shortest sequence from which native is faster than SDPA, r = 128."""
    kernel = Positive(DIM, features=128)
    for is_causal, bar in ((False, 256.0), (True, 512.0)):
        shortest = math.inf
        for length in (1024, 512, 256, 128, 64):
            x = tokens(length)
            best = seconds(
                {
                    "sdpa": lambda x=x, c=is_causal: sdpa(*x, is_causal=c),
                    "native": lambda x=x, c=is_causal: attend(x, kernel, c),
                },
                budget=settings.budget / 5,
            )
            if best["native"] > best["sdpa"]:
                break
            shortest = length
        name = "causal" if is_causal else "full"
        yield Row(f"faster than SDPA from N, {name}", shortest, "tokens", bar, at_least=False)


@case("decode")
def decode(settings: Settings) -> Iterator[Row]:
    """One-token step against SDPA over a cache of 16384 tokens, and the same step after few and very many tokens."""
    seen = (1024, 4096) if settings.quick else (1024, 2**20)
    kernel, x, cache = Positive(DIM, features=128), tokens(1), tokens(16384)
    options = {"kernel": kernel, "is_causal": True, "return_state": True}

    def steps(state: linattn.State) -> None:
        for _ in range(20):
            _, state = linattn.attention(*x, state=state, engine="native", **options)

    states, segment = {}, tokens(min(seen[0], 65536))
    with torch.no_grad():
        for count in seen:
            state = None
            for _ in range(0, count, segment[0].shape[2]):
                state = linattn.attention(*segment, state=state, **options)[1]
            states[count] = state  # nobody has looked at its tensors, as in a loop that writes tokens
        last = linattn.attention(*x, state=states[seen[0]], **options)[1]
        best = seconds(
            {
                "sdpa": lambda: sdpa(x[0], cache[1], cache[2]),
                **{str(n): lambda s=s: steps(s) for n, s in states.items()},
                "bare": _bare_steps(kernel, x, last),
            },
            budget=settings.budget,
        )
    few, many = (best[str(n)] / 20 for n in seen)
    yield Row("one-token step", few * 1e6, "microseconds")
    yield Row("  of which Python", (few - best["bare"] / 20) * 1e6, "microseconds", 10.0, at_least=False)
    yield Row("SDPA on a 16384-token cache / step", best["sdpa"] / few, "times", 60.0)
    yield Row(f"step after {seen[1]} tokens / after {seen[0]}", many / few, "times", 1.05, at_least=False)


def _bare_steps(kernel: Positive, x: Tokens, state: linattn.State) -> Callable[[], None]:
    """What the library does in such steps, and nothing of Python around it but the call."""
    fmap = plans.native_map(kernel, None, DIM)
    (plan,) = (plan for plan in fmap.plans.values() if isinstance(plan, DecodePlan))
    pack = pack_of(state)
    fresh, out = torch.empty_like(pack.buffer), torch.empty_like(plan.out_like)
    at = [*(y.data_ptr() for y in x), None, pack.buffer.data_ptr(), fresh.data_ptr(), out.data_ptr()]
    at += [kernel.projection.data_ptr(), plan.projection_bytes, plans.known_kernels[id(kernel)].stamp[1]]

    def run(keep: object = (pack, fresh, out)) -> None:
        for _ in range(20):
            library.linear_decode(ctypes.addressof(plan.call), *at)

    return run


@case("growth")
def growth(settings: Settings) -> Iterator[Row]:
    """The exponent of time in N, two heads, causal, and the memory a call takes beside its inputs and its output."""
    kernel, heads = Positive(DIM, features=128), 2
    longest = 16384 if settings.quick else 2**20
    lengths = [n for n in (4096, 16384, 65536, 262144, 1048576) if n <= longest]
    inputs = {length: tokens(length, heads) for length in lengths}
    calls = {str(n): lambda x=x: attend(x, kernel, True) for n, x in inputs.items()}
    with torch.no_grad():
        best = seconds(calls, budget=settings.budget, least=5)
        peak = peak_memory(lambda: attend(inputs[lengths[-1]], kernel, True))
    logs = [(math.log(n), math.log(best[str(n)])) for n in lengths]
    mean_n, mean_t = (sum(p[i] for p in logs) / len(logs) for i in range(2))
    slope = sum((n - mean_n) * (t - mean_t) for n, t in logs) / sum((n - mean_n) ** 2 for n, _ in logs)
    name = f"exponent of growth, {lengths[0]} to {lengths[-1]} tokens: distance from 1"
    yield Row(name, abs(slope - 1), "", 0.03, at_least=False)
    if peak is not None:
        extra = max(0.0, peak / 2**20 - heads * lengths[-1] * DIM * 4 / 2**20)
        yield Row(f"peak extra memory at {lengths[-1]} tokens", extra, "MiB", 64.0, at_least=False)


@case("small calls")
def small_calls(settings: Settings) -> Iterator[Row]:
    """Times faster than the torch engine, forward, 2 heads, dim 32: engine="auto" takes native wherever it can serve."""
    for name in [n for n in linattn.kernels.NAMES if n not in ("softmax", "nearfar", "identity")]:
        for length in (1, 16) if settings.quick else (1, 16, 256, 4096):
            x = [torch.randn(1, 2, length, 32) for _ in range(3)]
            for is_causal in (False, True):
                options = {"kernel": name, "is_causal": is_causal}
                calls = {
                    engine: lambda e=engine, x=x, o=options: linattn.attention(*x, engine=e, **o)
                    for engine in ("torch", "native")
                }
                with torch.no_grad():
                    best = seconds(calls, budget=settings.budget / 60)
                where = f"{name}, N = {length}{', causal' if is_causal else ''}"
                yield Row(where, best["torch"] / best["native"], "times")
