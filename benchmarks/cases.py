"""What is measured. Every function returns rows: (what, figure, bar or None, whether a larger figure is better)."""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import linattn
from clocks import seconds
from flops import both, forward
from linattn.engines.native.library import library
from linattn.kernels import Positive
from linattn.measure import peak_memory

HEADS, DIM = 8, 64


@dataclass
class Row:
    """One line of the table. `bar` is from the design; `unit` says what the figure counts."""

    what: str
    figure: float
    unit: str
    bar: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    def record(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}


def tokens(length: int, heads: int = HEADS, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, DIM, generator=generator).requires_grad_(grad) for _ in range(3))
    return q, k, v


def attend(x: tuple[Tensor, ...], kernel: Positive, is_causal: bool, engine: str = "native") -> Tensor:
    return linattn.attention(*x, kernel=kernel, is_causal=is_causal, engine=engine)


def train(function, x: tuple[Tensor, ...], grad: Tensor) -> None:
    torch.autograd.grad(function(x), x, grad)


def rates(lengths: tuple[int, ...], budget: float) -> list[Row]:
    """Necessary FLOPs per second, as a share of torch's own 2048^3 matrix product in the same run."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    rows = []
    for features in (128, 256):
        kernel = Positive(DIM, features=features)
        for length in lengths:
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
            sizes = HEADS, length, DIM, DIM, features
            for calls in (forward_calls, training):  # each beside the product: turns are as long as the slowest call
                best = seconds({"matmul": lambda: a @ b, **calls}, budget=budget)
                peak = 2 * 2048**3 / best.pop("matmul")
                if features == 128 and length == lengths[0] and calls is forward_calls:
                    rows.append(Row("torch 2048^3 matrix product", peak / 1e9, "GFLOP/s"))
                for name, time in best.items():
                    rows += _rate(name, time, peak, sizes)
    return rows


def _rate(name: str, time: float, peak: float, sizes: tuple[int, int, int, int, int]) -> list[Row]:
    where = f"r = {sizes[4]}, N = {sizes[1]}"
    if "backward" not in name:
        bar = {"full forward": 0.90, "causal forward": 0.75}[name]
        return [Row(f"{name}, {where}", forward(*sizes) / time / peak, "of matmul rate", bar)]
    bare = both(*sizes, again=False) / time / peak
    return [
        Row(f"{name}, {where}", both(*sizes) / time / peak, "of matmul rate", 0.60),
        Row(f"  the same without recomputation, {where}", bare, "of matmul rate"),
    ]


def against_softmax(length: int, budget: float) -> list[Row]:
    """Times faster than torch's scaled_dot_product_attention, r = 128; and than the torch engine."""
    kernel = Positive(DIM, features=128)
    x, xg, ones = tokens(length), tokens(length, grad=True), torch.ones(1, HEADS, length, DIM)
    rows = []
    for is_causal, bar in ((False, 70.0), (True, 22.0)):
        name = "causal" if is_causal else "full"
        best = seconds(
            {
                "sdpa": lambda c=is_causal: sdpa(*x, is_causal=c),
                "native": lambda c=is_causal: attend(x, kernel, c),
                "torch": lambda c=is_causal: attend(x, kernel, c, "torch"),
            },
            budget=budget,
            least=2,
        )
        rows.append(Row(f"SDPA / native, {name}, N = {length}", best["sdpa"] / best["native"], "times", bar))
        rows.append(Row(f"torch engine / native, {name}, N = {length}", best["torch"] / best["native"], "times"))
    best = seconds(
        {
            "sdpa": lambda: train(lambda y: sdpa(*y, is_causal=True), xg, ones),
            "native": lambda: train(lambda y: attend(y, kernel, True), xg, ones),
        },
        budget=budget,
        least=1,
    )
    ratio = best["sdpa"] / best["native"]
    return [*rows, Row(f"SDPA / native, causal forward + backward, N = {length}", ratio, "times", 15.0)]


def crossover(budget: float) -> list[Row]:
    """The shortest sequence from which native is faster than SDPA, r = 128."""
    kernel, rows = Positive(DIM, features=128), []
    for is_causal, bar in ((False, 256.0), (True, 512.0)):
        shortest = math.inf
        for length in (1024, 512, 256, 128, 64):
            x = tokens(length)
            best = seconds(
                {
                    "sdpa": lambda x=x, c=is_causal: sdpa(*x, is_causal=c),
                    "native": lambda x=x, c=is_causal: attend(x, kernel, c),
                },
                budget=budget / 5,
            )
            if best["native"] > best["sdpa"]:
                break
            shortest = length
        name = "causal" if is_causal else "full"
        rows.append(Row(f"faster than SDPA from N, {name}", shortest, "tokens", bar, at_least=False))
    return rows


def decode(seen: tuple[int, int], budget: float) -> list[Row]:
    """One-token step against SDPA over a cache of 16384 tokens, and the same step after few and very many tokens."""
    kernel, x, cache = Positive(DIM, features=128), tokens(1), tokens(16384)

    def steps(state):
        q, k, v = x
        for _ in range(20):
            _, state = linattn.attention(
                q, k, v, kernel=kernel, is_causal=True, state=state, return_state=True, engine="native"
            )

    def bare_steps(state):
        """What the library does in such steps, and nothing of Python around it but the call."""
        pack = state.__dict__["_pack"]
        call, fresh, out = pack.about.call, torch.empty_like(pack.buffer), torch.empty_like(pack.about.out_like)
        at = [*(y.data_ptr() for y in x), None, pack.buffer.data_ptr(), fresh.data_ptr(), out.data_ptr()]

        def run(keep=(pack, fresh, out)):
            for _ in range(20):
                library.step(call, *at)

        return run

    states, stretch = {}, tokens(min(seen[0], 65536))
    with torch.no_grad():
        for count in seen:
            state = None
            while state is None or int(state.tokens.max()) < count:
                options = {"kernel": kernel, "is_causal": True, "state": state, "return_state": True}
                state = linattn.attention(*stretch, **options)[1]
            states[count] = state
        last = linattn.attention(*x, state=states[seen[0]], kernel=kernel, is_causal=True, return_state=True)[1]
        best = seconds(
            {
                "sdpa": lambda: sdpa(x[0], cache[1], cache[2]),
                **{str(n): lambda s=s: steps(s) for n, s in states.items()},
                "bare": bare_steps(last),
            },
            budget=budget,
        )
    few, many = (best[str(n)] / 20 for n in seen)
    return [
        Row("one-token step", few * 1e6, "microseconds"),
        Row("  of which Python", (few - best["bare"] / 20) * 1e6, "microseconds", 10.0, at_least=False),
        Row("SDPA on a 16384-token cache / step", best["sdpa"] / few, "times", 60.0),
        Row(f"step after {seen[1]} tokens / after {seen[0]}", many / few, "times", 1.05, at_least=False),
    ]


def growth(longest: int, budget: float) -> tuple[list[Row], dict[int, float]]:
    """The exponent of time in N, two heads, causal, and the memory a call takes beside its inputs and its output."""
    kernel, heads = Positive(DIM, features=128), 2
    lengths = [n for n in (4096, 16384, 65536, 262144, 1048576) if n <= longest]
    inputs = {length: tokens(length, heads) for length in lengths}
    with torch.no_grad():
        best = seconds({str(n): lambda x=x: attend(x, kernel, True) for n, x in inputs.items()}, budget=budget, least=5)
        peak = peak_memory(lambda: attend(inputs[lengths[-1]], kernel, True))
    times = {length: best[str(length)] for length in lengths}
    logs = [(math.log(n), math.log(t)) for n, t in times.items()]
    mean_n, mean_t = (sum(p[i] for p in logs) / len(logs) for i in range(2))
    slope = sum((n - mean_n) * (t - mean_t) for n, t in logs) / sum((n - mean_n) ** 2 for n, _ in logs)
    name = f"exponent of growth, {lengths[0]} to {lengths[-1]} tokens: distance from 1"
    rows = [Row(name, abs(slope - 1), "", 0.03, at_least=False)]
    if peak is not None:
        extra = max(0.0, peak / 2**20 - heads * lengths[-1] * DIM * 4 / 2**20)
        rows.append(Row(f"peak extra memory at {lengths[-1]} tokens", extra, "MiB", 64.0, at_least=False))
    return rows, times
