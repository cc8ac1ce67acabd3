"""The update rules of today's models: shares of the matrix-product rate, times the reference code of transformers, decoding.

FLOPs are counted as linattn.measure.flops says. A backward pass counts as twice its forward pass.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import linattn
from linattn.measure import flops, peak_memory
from linattn.measure.rules import reference_code
from registry import Row, Settings, case
from timer import matmul_rate, seconds

HEADS, DIM = 8, 128  # of the delta rules and of the decayed sums
SSD_HEADS, SSD_DIM, SSD_STATE = 24, 64, 128  # Mamba-2
SCAN_CHANNELS, SCAN_STATE = 1536, 16  # Mamba-1


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape)


def length(settings: Settings) -> int:
    return 512 if settings.quick else 4096


def reference(family: str, name: str) -> Callable[..., Any] | None:
    """A function of transformers' own modelling code; None, and a line that says so, where it is not there."""
    found = reference_code(family, name)
    if found is None:
        print(f"  (no reference: transformers has no {family} here)")
    return found


def train(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    leaves = tuple(x.detach().requires_grad_() for x in inputs)

    def run() -> object:
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


@case("delta rule")
def delta_rule(settings: Settings) -> Iterator[Row]:
    """Gated delta rule and KDA, 8 heads of 128 x 128: share of the matrix-product rate, and times transformers."""
    N = length(settings)
    q, k, v = draw(1, HEADS, N, DIM), normalize(draw(1, HEADS, N, DIM), dim=-1), draw(1, HEADS, N, DIM)
    beta = torch.rand(1, HEADS, N)
    rules = {
        "gated delta rule": (-softplus(draw(1, HEADS, N)), 0.40, 0.30, None),
        "KDA": (-softplus(draw(1, HEADS, N, DIM)), 0.30, None, 30.0),
    }
    peers = {
        "gated delta rule": reference("qwen3_next", "torch_chunk_gated_delta_rule"),
        "KDA": reference("kimi_linear", "chunk_kimi_delta_attention"),
    }
    work = flops.delta_rule(HEADS, N, DIM, DIM)
    for name, (log_decay, forward_bar, training_bar, times_bar) in rules.items():

        def attend(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
            return linattn.delta_rule(q, k, v, beta=beta, log_decay=log_decay)

        inputs = q, k, v, beta, log_decay
        with torch.no_grad():
            best, peak = matmul_rate({"forward": lambda inputs=inputs: attend(*inputs)}, settings.budget)
        yield Row(f"{name}, forward, N = {N}", work / best["forward"] / peak, "of matmul rate", forward_bar)
        trained, peak = matmul_rate({"training": train(attend, inputs)}, settings.budget)
        share = 3 * work / trained["training"] / peak
        yield Row(f"{name}, forward + backward, N = {N}", share, "of matmul rate", training_bar)
        peer = peers[name]
        if peer is not None:
            tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
            gates = log_decay.transpose(1, 2), beta.transpose(1, 2)
            with torch.no_grad():
                theirs = seconds({"theirs": lambda p=peer, x=tokens_first, g=gates: p(*x, *g)}, budget=2, least=1)
            yield Row(f"transformers / native, {name}", theirs["theirs"] / best["forward"], "times", times_bar)


@case("decayed sums")
def decayed_sums(settings: Settings) -> Iterator[Row]:
    """Lightning attention and GLA, 8 heads of 128 x 128, no denominator: share of the matrix-product rate."""
    N = length(settings)
    q, k, v = draw(1, HEADS, N, DIM), draw(1, HEADS, N, DIM), draw(1, HEADS, N, DIM)
    work = flops.decayed_sums(HEADS, N, DIM, DIM)
    decays = {"a decay for each head": draw(1, HEADS, N), "a decay for each channel": draw(1, HEADS, N, DIM)}
    for name, raw in decays.items():

        def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
            return linattn.attention(q, k, v, None, 0.0, True, kernel="identity", normalize=False, log_decay=log_decay)

        inputs = q, k, v, -softplus(raw)
        with torch.no_grad():
            best, peak = matmul_rate({"forward": lambda inputs=inputs: attend(*inputs)}, settings.budget)
        bar = 0.65 if "head" in name else None
        yield Row(f"{name}, forward, N = {N}", work / best["forward"] / peak, "of matmul rate", bar)
        trained, peak = matmul_rate({"training": train(attend, inputs)}, settings.budget)
        share = 3 * work / trained["training"] / peak
        yield Row(f"{name}, forward + backward, N = {N}", share, "of matmul rate")


@case("mamba-2")
def mamba2(settings: Settings) -> Iterator[Row]:
    """The chunk scan of Mamba-2 (24 heads of 64, state 128, one group): rate, times transformers, extra memory."""
    from linattn.functional.decayed_sums import decayed_sums as sums

    N = length(settings)
    x, B, C = draw(1, N, SSD_HEADS, SSD_DIM), draw(1, N, 1, SSD_STATE), draw(1, N, 1, SSD_STATE)
    dt, A = softplus(draw(1, N, SSD_HEADS)), -torch.rand(SSD_HEADS)

    def scan() -> Tensor:
        query, key, value = C.transpose(1, 2), B.transpose(1, 2), (x * dt.unsqueeze(-1)).transpose(1, 2)
        return sums(query, key, value, log_decay=(A * dt).transpose(1, 2), scale=1.0, enable_gqa=True)[0]

    work = flops.decayed_sums(SSD_HEADS, N, SSD_STATE, SSD_DIM)
    with torch.no_grad():
        best, peak = matmul_rate({"scan": scan}, settings.budget)
        extra = peak_memory(scan)
    yield Row(f"forward, N = {N}", work / best["scan"] / peak, "of matmul rate", 0.65)
    if extra is not None:
        beside = extra / 2**20 - SSD_HEADS * N * SSD_DIM * 4 / 2**20
        yield Row(f"memory beside inputs and output, N = {N}", beside, "MiB", 50.0, at_least=False)
    peer = reference("mamba2", "mamba2_chunk_scan")
    if peer is not None:
        with torch.no_grad():
            theirs = seconds({"theirs": lambda: peer(x, dt, A, B, C, 256)}, budget=3, least=1)["theirs"]
        yield Row("transformers / native", theirs / best["scan"], "times", 20.0)


@case("mamba-1")
def mamba1(settings: Settings) -> Iterator[Row]:
    """The selective scan of Mamba-1 (1536 channels, state 16) against transformers' loop over tokens."""
    N = length(settings)
    u, delta = draw(1, SCAN_CHANNELS, N), draw(1, SCAN_CHANNELS, N)
    A, B, C = -torch.rand(SCAN_CHANNELS, SCAN_STATE), draw(1, SCAN_STATE, N), draw(1, SCAN_STATE, N)
    D, z = draw(SCAN_CHANNELS), draw(1, SCAN_CHANNELS, N)
    options = {"D": D, "z": z, "delta_softplus": True}
    with torch.no_grad():
        ours = seconds({"ours": lambda: linattn.selective_scan(u, delta, A, B, C, **options)}, budget=settings.budget)
    yield Row(f"forward, N = {N}", ours["ours"] * 1e3, "milliseconds")
    peer = reference("mamba", "mamba_selective_scan")
    if peer is not None:
        with torch.no_grad():
            theirs = seconds({"theirs": lambda: peer(u, delta, A, B, C, **options)}, budget=1, least=1)["theirs"]
        yield Row("transformers / native", theirs / ours["ours"], "times", 50.0)


@case("rules decode")
def decode(settings: Settings) -> Iterator[Row]:
    """One token of each rule, 32 heads of 128 x 128, beside torch's copy_ of the state: reading and writing it once.

    The state is donated, or kept: then the new one is written to other memory.
    """
    heads = 32
    q, k, v = draw(1, heads, 1, DIM), normalize(draw(1, heads, 1, DIM), dim=-1), draw(1, heads, 1, DIM)
    beta, per_head, per_channel = torch.rand(1, heads, 1), -torch.rand(1, heads, 1), -torch.rand(1, heads, 1, DIM)
    source, target = draw(1, heads, DIM, DIM), draw(1, heads, DIM, DIM)
    sums = {"kernel": "identity", "normalize": False, "is_causal": True, "return_state": True}
    rules = {
        "gated delta rule": partial(linattn.delta_rule, q, k, v, beta=beta, log_decay=per_head, return_state=True),
        "KDA": partial(linattn.delta_rule, q, k, v, beta=beta, log_decay=per_channel, return_state=True),
        "decayed sums": partial(linattn.attention, q, k, v, log_decay=per_head, **sums),
    }
    with torch.no_grad():
        calls = {name: steps(call, donate=True) for name, call in rules.items()}
        calls |= {f"{name}, old state kept": steps(call, donate=False) for name, call in rules.items()}
        best = seconds({"copy": lambda: target.copy_(source), **calls}, budget=settings.budget / 3)
    yield Row("copy of the state", best["copy"] * 1e6, "microseconds")
    for name in calls:
        bar = None if "kept" in name else 1.5
        yield Row(f"one token, {name}", best[name] * 1e6, "microseconds")
        yield Row(f"one token, {name}, beside a copy of the state", best[name] / best["copy"], "times", bar, False)


def steps(call: Callable[..., Any], donate: bool) -> Callable[[], object]:
    """Token after token, from a state of its own."""
    state = call()[1]

    def step() -> None:
        nonlocal state
        _, state = call(state=state, donate_state=donate)

    return step
