"""Causal calls with decay, gates and masks, and their definition, for tests of every engine."""

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

import linattn
from linattn.engines import Call, native, torch_engine
from linattn.engines.native.ffi import library
from linattn.kernels import Elu, Kernel, Learned, Polynomial, Positive, Relu, Taylor, Trig
from linattn.ops.linear_attention.chunk import smallest
from linattn.states import LinearState
from native_support import isas, tokens

DIM, VALUE_DIM = 6, 3
KERNELS = {
    "elu": Elu(),
    "relu": Relu(),
    "positive": Positive(DIM, 16),
    "one-feature": Positive(DIM, 1),
    "trig": Trig(DIM, 16),
    "polynomial": Polynomial(2, 1.0),
    "taylor": Taylor(2),
    "learned": Learned(DIM, 10),  # the native engine gets its features from torch
}
for _kernel in KERNELS.values():
    _kernel.requires_grad_(False)

engines = pytest.mark.parametrize(
    "engine",
    ["torch-float64", "torch-float32", *(pytest.param(f"native-{p.values[0]}", marks=p.marks) for p in isas)],
    indirect=True,
)
names = pytest.mark.parametrize("name", KERNELS)
several = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Engine:
    """An engine in one dtype; the native one on one instruction set."""

    name: str
    dtype: torch.dtype

    @property
    def module(self) -> ModuleType:
        return native if self.name == "native" else torch_engine

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float64


@pytest.fixture
def engine(request: pytest.FixtureRequest):
    name, kind = request.param.split("-")
    before = library.isa if name == "native" else ""
    if before:
        library.set_isa(kind)
    yield Engine(name, torch.float64 if kind == "float64" else torch.float32)
    if before:
        library.set_isa(before)


@dataclass
class Forget:
    """How the sums forget: "", "decay" or "gate" by the natural logarithms (B, H, T); and who is asked to compute it."""

    form: str
    direct: bool

    def attend(self, engine: Engine, kernel: Kernel, inputs: list[Tensor], state, mask: Tensor, log: Tensor):
        """Causal rows and the state after them."""
        if not self.direct:
            gates = {"decay": {"log_decay": log}, "gate": {"gate": log.exp()}}.get(self.form, {})
            options = {"kernel": kernel, "is_causal": True, "enable_gqa": True, "engine": engine.name}
            return linattn.attention(*inputs, key_mask=mask, state=state, return_state=True, **options, **gates)
        _, key, value = inputs
        if state is None:
            sizes = (key.shape[0],), key.shape[1], kernel.features_for(DIM), value.shape[-1]
            state = LinearState.empty(kernel.signature(), *sizes, dtype=engine.dtype)
        log_input = (-log.exp()).log1p() if self.form == "gate" else None
        log_decay = log if self.form else None
        signature = kernel.signature(None, inputs[0].shape[-1])
        call = Call(kernel, None, signature, is_causal=True, key_mask=mask, log_decay=log_decay, log_input=log_input)
        return engine.module.causal(call, *inputs, state)

    def definition(self, kernel: Kernel, inputs: list[Tensor], mask: Tensor, log: Tensor) -> tuple[Tensor, ...]:
        """Rows in O(N^2); the size of each denominator beside the largest weight it sees; how much of it cancelled."""
        query, key, value = inputs
        groups = query.shape[1] // key.shape[1]
        log_input = (-log.exp()).log1p() if self.form == "gate" else torch.zeros_like(log)
        log = log if self.direct else log.masked_fill(~mask.unsqueeze(1), 0)
        features, weight = kernel.scaled_key_features(key)
        weight = log_input if weight is None else weight + log_input
        weight = weight - log.cumsum(-1) if self.form else weight
        features, value, weight = (x.repeat_interleave(groups, 1) for x in (features, value, weight))
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() & mask[:, None, None]
        weight = weight.unsqueeze(-2).expand(*query.shape[:3], key.shape[2]).masked_fill(~visible, -torch.inf)
        top = weight.detach().amax(-1, keepdim=True)
        weight = (weight - top.masked_fill(top == -torch.inf, 0)).exp()
        query = kernel.scaled_query_features(query)[0]
        similar = query @ features.mT * weight
        total = similar.sum(-1, keepdim=True)
        small = total.detach().abs() <= smallest(torch.float64)
        rows = (similar @ value / total.masked_fill(small, 1)).masked_fill(small, 0)
        size = total.detach().abs().squeeze(-1)
        cancelled = (query.abs() @ features.abs().mT * weight).detach().sum(-1) / size.clamp_min(1e-300)
        return rows, size, cancelled


@dataclass
class Case:
    """A causal call: which keys are visible, how fast the sums forget, and where it is cut into several calls."""

    name: str
    length: int
    visible: float
    forget: Forget
    strength: float
    groups: int
    spread: float
    cuts: list[int]
    seed: int

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.name]

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        H, N, s = 2, self.length, self.seed
        query, key = tokens(1, H * self.groups, N, DIM, seed=s), tokens(1, H, N, DIM, seed=s + 1)
        key = key * 10 ** (self.spread * tokens(1, 1, N, 1, seed=s + 2).clamp(-1.5, 1.5))
        return [x.to(dtype) for x in (query, key, tokens(1, H, N, VALUE_DIM, seed=s + 3))]

    @property
    def mask(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        mask = torch.rand(1, self.length, generator=generator) < self.visible
        mask[:, self.seed % min(self.length, 7)] = True  # mostly an early key that the rest must not lose
        return mask

    @property
    def log(self) -> Tensor:
        """(1, 2, length): most tokens forget little, some much. No gate is exp(-700) or less."""
        generator = torch.Generator().manual_seed(self.seed + 4)
        log = -self.strength * torch.rand(1, 2, self.length, generator=generator, dtype=torch.float64) ** 3 - 0.01
        return log.clamp_min(-690) if self.forget.form == "gate" else log

    def definition(self) -> tuple[Tensor, ...]:
        return self.forget.definition(self.kernel, self.inputs(torch.float64), self.mask, self.log)

    def run(self, engine: Engine, inputs: list[Tensor], cuts: list[int], log: Tensor):
        """The rows of the calls that the cuts make of this one, and the last state."""
        rows, state, mask = [], None, self.mask
        for start, end in zip([0, *cuts], [*cuts, self.length], strict=False):
            part = [x[:, :, start:end] for x in inputs]
            gates = mask[:, start:end], log[..., start:end]
            out, state = self.forget.attend(engine, self.kernel, part, state, *gates)
            rows.append(out)
        return torch.cat(rows, 2), state


@st.composite
def cases(draw: st.DrawFn, longest: int = 300) -> Case:
    length = draw(st.sampled_from([n for n in (1, 2, 9, 48, 49, 100, 150, 300) if n <= longest]))
    name = draw(st.sampled_from(sorted(KERNELS)))
    return Case(
        name=name,
        length=length,
        visible=draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0])),
        forget=Forget(draw(st.sampled_from(["", "decay", "gate"])), draw(st.booleans())),
        strength=draw(st.sampled_from([0.01, 0.5, 5.0, 60.0, 690.0, 1e4])),
        groups=draw(st.sampled_from([1, 2])),
        spread=draw(st.sampled_from([0.0, 1.0])) if name in ("positive", "elu") else 0.0,
        cuts=sorted(draw(st.lists(st.integers(1, length), max_size=3))),
        seed=draw(st.integers(0, 10**6)),
    )
