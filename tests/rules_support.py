"""Inputs of the update rules, and comparisons with their step-by-step definitions."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linattn.ops.decayed_sums import chunk as sums_chunk
from linattn.ops.decayed_sums import reference as sums_reference
from linattn.ops.decayed_sums.call import DecayedSumsCall
from linattn.ops.delta_rule import chunk as delta_chunk
from linattn.ops.delta_rule import reference as delta_reference
from linattn.ops.delta_rule.call import DeltaRuleCall

DECAYS = ("none", "head", "channel")


@dataclass(frozen=True)
class Inputs:
    """Canonical tensors of one call; beta is None for decayed sums."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    state: Tensor
    mask: Tensor | None = None
    bounds: list[int] | None = None
    normalize_qk: bool = True
    scale: float = 0.3

    def tensors(self) -> dict[str, Tensor]:
        names = ("query", "key", "value", "beta", "log_decay", "state")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def map(self, change: Any) -> "Inputs":
        return replace(self, **{name: change(x) for name, x in self.tensors().items()})

    def tokens(self, start: int, end: int, state: Tensor | None = None) -> "Inputs":
        """Some of the tokens, from another state."""
        cut = {name: x[:, :, start:end] for name, x in self.tensors().items() if name != "state"}
        mask = None if self.mask is None else self.mask[:, start:end]
        return replace(self, **cut, mask=mask, state=self.state if state is None else state)

    def run(self, form: str) -> tuple[Tensor, Tensor]:
        """form: "reference" or "chunk"."""
        tokens = self.query, self.key, self.value
        rest = self.log_decay, self.mask, self.bounds, self.state, self.scale
        if self.beta is None:
            sums = {"reference": sums_reference, "chunk": sums_chunk}[form].decayed_sums
            return sums(DecayedSumsCall(*tokens, *rest))
        delta = {"reference": delta_reference, "chunk": delta_chunk}[form].delta_rule
        return delta(DeltaRuleCall(*tokens, self.beta, *rest, self.normalize_qk))


def make(
    rule: str,
    T: int,
    decay: str = "head",
    *,
    heads: tuple[int, int, int] = (2, 2, 2),
    B: int = 2,
    D: int = 8,
    M: int = 5,
    bounds: list[int] | None = None,
    mask: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """heads: of query, key and value. Log-decays lie between 0 and -20, most of them near 0, some exactly 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    Hq, Hk, H = heads
    g = None
    if decay != "none":
        drawn = uniform(B, H, T, *([D] if decay == "channel" else []))
        g = torch.where(drawn < 0.1, 0.0, -20 * drawn**6)
    beta = 2 * uniform(B, H, T) if rule == "delta" else None
    n = 1 if bounds is None else len(bounds) - 1
    seen = torch.rand(B, T, generator=generator) > 0.3 if mask else None
    return Inputs(
        normal(B, Hq, T, D), normal(B, Hk, T, D), normal(B, H, T, M), beta, g, normal(B * n, H, D, M), seen, bounds
    )


def poisoned(inputs: Inputs) -> Inputs:
    """NaN in what masked tokens write."""
    assert inputs.mask is not None

    def spoil(x: Tensor) -> Tensor:
        hidden = ~inputs.mask[:, None].reshape(x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3))
        return x.masked_fill(hidden, torch.nan)

    names = [name for name in inputs.tensors() if name not in ("query", "state")]
    return replace(inputs, **{name: spoil(getattr(inputs, name)) for name in names})


def results(inputs: Inputs, form: str) -> dict[str, Tensor]:
    """Output, final state, and the gradient of a function of both for every tensor."""
    leaves = inputs.map(lambda x: x.detach().clone().requires_grad_())
    out, final = leaves.run(form)
    loss = out.double().sin().sum() + final.double().cos().sum()
    names = list(leaves.tensors())
    grads = torch.autograd.grad(loss, list(leaves.tensors().values()))
    return {"out": out, "final": final, **dict(zip(names, grads, strict=True))}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-8) -> None:
    """Each tensor to a tolerance relative to its largest number."""
    assert got.keys() == expected.keys()
    for name, x in got.items():
        y = expected[name].double()
        assert x.shape == y.shape, name
        if y.numel() == 0:
            continue
        error, size = (x.double() - y).abs().max().item(), y.abs().max().item()
        assert error <= tolerance * max(size, 1e-12), f"{name} differs by {error:.3g} of {size:.3g}"


def assert_chunked_equals_definition(inputs: Inputs) -> None:
    assert_same(results(inputs, "chunk"), results(inputs, "reference"))


def tokens(*batch: int, T: int = 50, heads: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0):
    """query, key, value, and {"beta", "log_decay"}."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*batch, heads, T, n, generator=generator, dtype=torch.float64).to(dtype) for n in (8, 8, 5))
    beta, g = (torch.rand(*batch, heads, T, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return q, k, v, {"beta": 2 * beta, "log_decay": -g}


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    assert_same({"": actual}, {"": expected}, tolerance)
