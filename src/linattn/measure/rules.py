"""The update rules on this machine: time, memory and growth over lengths, a decoded token, and the code of transformers."""

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from ..functional.attention import attention
from ..functional.decayed_sums import decayed_sums
from ..functional.delta_rule import delta_rule
from ..functional.selective_scan import selective_scan
from . import flops
from .clock import peak_memory, timing

REFERENCE_TOKENS = 4096  # at most, for the code of transformers, some of which takes seconds
PRODUCT = 2048  # rows and columns of the matrix product whose rate is the roof
CHANNELS, SCAN_STATE = 1536, 16  # of Mamba-1's scan


class Built(NamedTuple):
    """A rule on the tensors of one call: itself, which takes state and return_state, and the code of transformers if any."""

    call: Callable[..., Any]
    reference: Callable[[], object] | None = None


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        build: of heads, dim and a number of tokens.
        flops: of heads, tokens, dim and value dim; None where the rule is not made of matrix products.
        state_shape: of heads and dim; for a copy of the state.
        donates: whether the call takes donate_state.
    """

    build: Callable[[int, int, int], Built]
    flops: Callable[[int, int, int, int], int] | None
    state_shape: Callable[[int, int], tuple[int, ...]] = lambda heads, dim: (heads, dim, dim)
    donates: bool = True


@dataclass(frozen=True)
class RuleRow:
    """One rule at one length. matmul_share: of the rate of torch's own matrix product, on necessary FLOPs.

    reference_speedup: times faster than transformers. step_seconds: of a decoded token; step_copies: the same in copies of the
    state. Those are measured once for each rule and stand in its last row; the reference at 4096 tokens at most.
    """

    rule: str
    tokens: int
    seconds: float
    matmul_share: float | None
    peak_bytes: int | None
    reference_speedup: float | None = None
    step_seconds: float | None = None
    step_copies: float | None = None


def compare_rules(
    lengths: Sequence[int],
    names: Sequence[str],
    *,
    heads: int = 8,
    dim: int = 128,
    seed: int = 0,
    seconds: float = 0.2,
    progress: Callable[[Sequence[str]], Iterator[str]] = iter,
) -> list[RuleRow]:
    """Times the named update rules, of RULES, at every length: causal, forward, float32."""
    labels = progress([f"{name} {n}" for name in names for n in lengths])
    found = []
    with torch.no_grad():
        for name in names:
            for n in sorted(lengths):
                next(labels, None)
                torch.manual_seed(seed)
                found.append(_row(name, heads, dim, n, seconds))
            step, copies = _step(RULES[name], heads, dim)
            found[-1] = dataclasses.replace(
                found[-1],
                reference_speedup=_reference(RULES[name], heads, dim, min(REFERENCE_TOKENS, max(lengths)), seconds),
                step_seconds=step,
                step_copies=copies,
            )
    next(labels, None)
    return found


def _row(name: str, heads: int, dim: int, tokens: int, seconds: float) -> RuleRow:
    rule = RULES[name]
    call = rule.build(heads, dim, tokens).call
    best, product = _beside_a_product(call, seconds)
    share = None
    if rule.flops is not None:
        share = rule.flops(heads, tokens, dim, dim) / best / (2 * PRODUCT**3 / product)
    return RuleRow(name, tokens, best, share, peak_memory(call))


def _beside_a_product(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Seconds of the call and of a matrix product, in their best of turns taken one after the other."""
    a, b = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    pair, best = (call, lambda: a @ b), [float("inf"), float("inf")]
    for one in pair:
        one()
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds:
        for i, one in enumerate(pair):
            begun = time.perf_counter()
            one()
            best[i] = min(best[i], time.perf_counter() - begun)
        rounds += 1
    return best[0], best[1]


def _reference(rule: Rule, heads: int, dim: int, tokens: int, seconds: float) -> float | None:
    """Times faster than the code of transformers."""
    call, reference = rule.build(heads, dim, tokens)
    if reference is None:
        return None
    ours = timing(call, seconds=seconds).best
    return timing(reference, seconds=seconds, repeats=1).best / ours


def _step(rule: Rule, heads: int, dim: int) -> tuple[float, float]:
    """The time of a decoded token, and in copies of its state."""
    call = rule.build(heads, dim, 1).call
    call = partial(call, donate_state=True) if rule.donates else call
    _, state = call(return_state=True)
    source, target = torch.empty(rule.state_shape(heads, dim)), torch.empty(rule.state_shape(heads, dim))
    step, copy = float("inf"), float("inf")
    for _ in range(300):
        begun = time.perf_counter()
        _, state = call(return_state=True, state=state)
        middle = time.perf_counter()
        target.copy_(source)
        step, copy = min(step, middle - begun), min(copy, time.perf_counter() - middle)
    return step, step / copy


def reference_code(family: str, name: str) -> Callable[..., Any] | None:
    """A function of transformers' own modelling code; None where transformers is not installed or has no such model."""
    try:
        found: Callable[..., Any] | None = getattr(
            importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name, None
        )
    except ImportError:
        return None
    return found


def _tokens(heads: int, dim: int, n: int, channels: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and log_decay."""
    q, k, v = (torch.randn(1, heads, n, dim) for _ in range(3))
    return q, normalize(k, dim=-1), v, -softplus(torch.randn(1, heads, n, *([dim] if channels else [])))


def _sums(heads: int, dim: int, n: int, *, channels: bool) -> Built:
    q, k, v, decay = _tokens(heads, dim, n, channels)
    return Built(partial(attention, q, k, v, is_causal=True, kernel="identity", normalize=False, log_decay=decay))


def _delta(heads: int, dim: int, n: int, *, channels: bool) -> Built:
    q, k, v, decay = _tokens(heads, dim, n, channels)
    beta = torch.rand(1, heads, n)
    names = (
        ("kimi_linear", "chunk_kimi_delta_attention") if channels else ("qwen3_next", "torch_chunk_gated_delta_rule")
    )
    theirs = reference_code(*names)
    call = partial(delta_rule, q, k, v, beta=beta, log_decay=decay)
    return Built(call, theirs and partial(theirs, *(x.transpose(1, 2) for x in (q, k, v, decay, beta))))


def _mamba2(heads: int, dim: int, n: int) -> Built:
    """One group: all heads share their keys B and queries C."""
    x, B, C = torch.randn(1, n, heads, dim), torch.randn(1, n, 1, dim), torch.randn(1, n, 1, dim)
    dt, A = softplus(torch.randn(1, n, heads)), -torch.rand(heads)
    theirs = reference_code("mamba2", "mamba2_chunk_scan")

    def call(return_state: bool = False, state: Any = None) -> Any:
        query, key, value = C.transpose(1, 2), B.transpose(1, 2), (x * dt.unsqueeze(-1)).transpose(1, 2)
        decay = (A * dt).transpose(1, 2)
        out = decayed_sums(query, key, value, log_decay=decay, scale=1.0, enable_gqa=True, state=state)
        return out if return_state else out[0]

    return Built(call, theirs and partial(theirs, x, dt, A, B, C, 256))


def _mamba1(_heads: int, _dim: int, n: int) -> Built:
    u, delta, z = (torch.randn(1, CHANNELS, n) for _ in range(3))
    B, C = torch.randn(1, SCAN_STATE, n), torch.randn(1, SCAN_STATE, n)
    tensors = u, delta, -torch.rand(CHANNELS, SCAN_STATE), B, C
    options = {"D": torch.randn(CHANNELS), "z": z, "delta_softplus": True}
    theirs = reference_code("mamba", "mamba_selective_scan")
    return Built(partial(selective_scan, *tensors, **options), theirs and partial(theirs, *tensors, **options))


RULES = {
    "retention": Rule(partial(_sums, channels=False), flops.decayed_sums),
    "gla": Rule(partial(_sums, channels=True), flops.decayed_sums),
    "gated-delta": Rule(partial(_delta, channels=False), flops.delta_rule),
    "kda": Rule(partial(_delta, channels=True), flops.delta_rule),
    "mamba2": Rule(_mamba2, flops.decayed_sums, donates=False),
    "mamba1": Rule(_mamba1, None, lambda heads, dim: (CHANNELS, SCAN_STATE), donates=False),
}
