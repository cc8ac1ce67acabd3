"""Kernels next to softmax on this machine: time, memory and error over a range of lengths."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..engines import EngineName
from ..functional.attention import attention
from ..kernels import Kernel, KernelName, resolve
from ..nearfar import NearFar
from .clock import peak_memory, timing
from .fidelity import fidelity
from .machine import machine
from .rules import RuleRow

ERROR_UP_TO = 2048  # tokens up to which the error is measured: exact softmax is needed for it


@dataclass(frozen=True)
class Row:
    """One kernel and engine at one length. Ratios are against softmax in the same run."""

    kernel: str
    engine: str
    tokens: int
    seconds: float
    speedup: float
    peak_bytes: int | None
    relative_error: float | None = None
    baseline_error: float | None = None
    bad_rows: float | None = None


@dataclass
class Comparison:
    """Everything one run measured."""

    machine: dict[str, object]
    setting: dict[str, object]
    softmax: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    rules: list[RuleRow] = field(default_factory=list)

    def of(self, kernel: str, engine: str) -> list[Row]:
        return [row for row in self.rows if (row.kernel, row.engine) == (kernel, engine)]

    def kinds(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((row.kernel, row.engine) for row in self.rows))

    def summary(self) -> list[dict[str, object]]:
        """For each kernel and engine the crossover with softmax and the exponent of growth."""
        found: list[dict[str, object]] = [
            {"kernel": "softmax", "engine": "torch SDPA", "crossover": None, "exponent": exponent(self.softmax)}
        ]
        for kernel, engine in self.kinds():
            rows = self.of(kernel, engine)
            found.append({"kernel": kernel, "engine": engine, "crossover": crossover(rows), "exponent": exponent(rows)})
        return found

    def rule_summary(self) -> list[dict[str, object]]:
        """For each update rule its last row and the exponent of growth."""
        found = []
        for name in dict.fromkeys(row.rule for row in self.rules):
            rows = [row for row in self.rules if row.rule == name]
            found.append({**dataclasses.asdict(rows[-1]), "exponent": exponent(rows)})
        return found

    def as_dict(self) -> dict[str, object]:
        """All figures as plain data, for JSON."""
        return {**dataclasses.asdict(self), "summary": self.summary(), "rule_summary": self.rule_summary()}


def crossover(rows: Sequence[Row]) -> float | None:
    """The length from which the kernel stays faster than softmax; None if it is slower at the longest.

    Between two measured lengths the speed-up is taken as a power of the length. A kernel that is faster from the shortest
    length on gets that length: the true crossover is there or below.
    """
    ordered = sorted(rows, key=lambda row: row.tokens)
    if not ordered or ordered[-1].speedup < 1:
        return None
    for before, after in zip(reversed(ordered[:-1]), reversed(ordered), strict=False):
        if before.speedup < 1:
            share = -math.log(before.speedup) / (math.log(after.speedup) - math.log(before.speedup))
            return before.tokens * (after.tokens / before.tokens) ** share
    return float(ordered[0].tokens)


def exponent(rows: Sequence[Row | RuleRow]) -> float | None:
    """p in time ~ tokens^p, fitted to the longer half of the lengths, where constant costs no longer matter."""
    ordered = sorted(rows, key=lambda row: row.tokens)
    tail = ordered[len(ordered) // 2 :] if len(ordered) > 3 else ordered
    if len(tail) < 2:
        return None
    return float(np.polyfit(np.log([r.tokens for r in tail]), np.log([r.seconds for r in tail]), 1)[0])


def compare(
    lengths: Sequence[int],
    kernels: Sequence[Kernel | KernelName],
    *,
    engines: Sequence[EngineName] = ("auto",),
    batch: int = 1,
    heads: int = 8,
    dim: int = 64,
    is_causal: bool = False,
    backward: bool = False,
    spread: float = 1.0,
    seed: int = 0,
    seconds: float = 0.2,
    progress: Callable[[Sequence[str]], Iterator[str]] = iter,
) -> Comparison:
    """Times every kernel and engine at every length beside torch's scaled_dot_product_attention.

    Queries, keys and values are Gaussian, queries and keys of standard deviation `spread`: larger is sharper attention.
    """
    setting = {"batch": batch, "heads": heads, "dim": dim, "causal": is_causal, "backward": backward, "spread": spread}
    result = Comparison(machine(), {**setting, "dtype": "float32", "seed": seed, "lengths": list(lengths)})
    plan: list[tuple[int, Kernel | KernelName | None, EngineName]] = []
    for n in lengths:
        plan.append((n, None, "torch"))
        for one in kernels:
            usable: Sequence[EngineName] = ["torch"] if _only_torch(one, backward) else engines
            plan += [(n, one, engine) for engine in usable]
    labels = progress([f"{_label(kernel)} {n}" for n, kernel, _ in plan])
    inputs: list[Tensor] = []
    for (n, kernel, engine), _ in zip(plan, labels, strict=False):
        if kernel is None:
            generator = torch.Generator().manual_seed(seed)
            inputs = [torch.randn(batch, heads, n, dim, generator=generator) for _ in range(3)]
            inputs[0] *= spread
            inputs[1] *= spread

            def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

            elapsed, peak = _measure(softmax, inputs, backward, seconds)
            result.softmax.append(Row("softmax", "torch SDPA", n, elapsed, 1.0, peak))
            continue
        chosen = resolve(kernel, dim, inputs[0].device)

        def call(q: Tensor, k: Tensor, v: Tensor, chosen: Kernel = chosen, engine: EngineName = engine) -> Tensor:
            return attention(q, k, v, kernel=chosen, is_causal=is_causal, engine=engine)

        elapsed, peak = _measure(call, inputs, backward, seconds)
        row = Row(_label(kernel), engine, n, elapsed, result.softmax[-1].seconds / elapsed, peak)
        if n <= ERROR_UP_TO:
            row = dataclasses.replace(row, **_errors(result, row, inputs, chosen, is_causal))
        result.rows.append(row)
    next(labels, None)
    return result


def _errors(result: Comparison, row: Row, inputs: Sequence[Tensor], kernel: Kernel, is_causal: bool) -> dict[str, Any]:
    """The kernel's error at this length, measured once: it is the same in every engine."""
    for known in result.rows:
        if (known.kernel, known.tokens) == (row.kernel, row.tokens):
            return {name: getattr(known, name) for name in ("relative_error", "baseline_error", "bad_rows")}
    query, key, value = inputs
    report = fidelity(query, key, value, kernel, is_causal)
    assert report.baseline is not None
    baseline = report.baseline.relative_error
    return {"relative_error": report.relative_error, "baseline_error": baseline, "bad_rows": report.bad_rows}


def _measure(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], backward: bool, seconds: float
) -> tuple[float, int | None]:
    tensors = [x.clone().requires_grad_(backward) for x in inputs]

    def run() -> object:
        if not backward:
            with torch.no_grad():
                return call(*tensors)
        out = call(*tensors)
        return out, torch.autograd.grad(out, tensors, torch.ones_like(out))

    return timing(run, seconds=seconds).best, peak_memory(run)


def _only_torch(kernel: Kernel | KernelName, backward: bool) -> bool:
    """Near/far is trained in the torch engine alone."""
    return backward and (isinstance(kernel, NearFar) or kernel == "nearfar")


def _label(kernel: Kernel | KernelName | None) -> str:
    if kernel is None:
        return "softmax"
    if isinstance(kernel, str):
        return "near/far" if kernel == "nearfar" else kernel
    return kernel.signature()
