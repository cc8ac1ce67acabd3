"""Random calls of linattn.attention for tests/functional/test_fuzz.py, and their O(N^2) twin in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import linattn
from linattn import kernels
from linattn.engines import native
from linattn.kernels import Kernel

DIM = 6


def squares(x: Tensor) -> Tensor:
    return x.square() + 0.1


LINEAR: dict[str, Callable[[], Kernel]] = {
    "elu": kernels.Elu,
    "relu": kernels.Relu,
    "positive": lambda: kernels.Positive(DIM, 16),
    "positive-hyperbolic": lambda: kernels.Positive(DIM, 12, hyperbolic=True, optimal=True),
    "trig": lambda: kernels.Trig(DIM, 32),
    "taylor": lambda: kernels.Taylor(2),
    "polynomial": lambda: kernels.Polynomial(2, 1.0),
    "identity": kernels.Identity,  # signed: never normalised
    "learned": lambda: kernels.Learned(DIM, 8),
    "custom": lambda: kernels.Custom(squares),
}
# Near/far with room for every key of a case: nothing is pooled, so it is softmax.
QUADRATIC: dict[str, Callable[[], Kernel]] = {
    "softmax": kernels.Softmax,
    "nearfar": lambda: linattn.NearFar(window=512, slots=512),
}
KERNELS = LINEAR | QUADRATIC
LOG_WEIGHTED = ("positive", "positive-hyperbolic", "trig")  # features come with log-weights
SOME_FEATURES_VANISH = ("relu", "trig", "polynomial")
HALF = (torch.float16, torch.bfloat16)
# Largest error of an output, relative to the largest value and times the condition number of the row.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Call:
    """One call of a sequence of calls: numbers of (queries, keys) for each packed sequence."""

    lengths: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    engine: str


@dataclass(frozen=True)
class Case:
    """What is called; the tensors follow from the seed.

    mask: which keys are visible; "poison" also puts NaN into those that are not.
    forget: "log_decay" or "gate"; strong ones forget everything within a few tokens, or at once.
    """

    kernel: str
    calls: tuple[Call, ...] = ()
    batch: tuple[int, ...] = (1,)
    kv_heads: int = 1
    groups: int = 1
    causal: bool = True
    packed: bool = False
    normalize: bool = True
    mask: str | None = None
    forget: str | None = None
    strong: bool = False
    scale: float | None = None
    shared_keys: bool = False
    heads_last: bool = False
    gradients: bool = False
    seed: int = 0


SIZES = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129])


@st.composite
def cases(draw: st.DrawFn, kernel: str, *, self_attention: bool = False) -> Case:
    """Calls of one kernel, in every combination that the library allows.

    self_attention: only causal calls, with as many queries as keys.
    """
    linear = kernel in LINEAR
    causal, packed = self_attention or draw(st.booleans()), draw(st.booleans())
    cross = not self_attention and draw(st.integers(0, 3)) == 0
    gradients = draw(st.integers(0, 2)) == 0
    normalize = not (kernel == "identity" or (linear and draw(st.integers(0, 4)) == 0))
    count = draw(st.integers(1, 4)) if packed else 1
    splits = draw(st.integers(1, 4)) if draw(st.booleans()) and not (kernel == "nearfar" and packed and cross) else 1
    wide = [torch.float32, torch.float32, torch.float64]
    dtypes = wide if gradients else [*wide, *HALF]
    mixed = not gradients and draw(st.integers(0, 7)) == 0  # a state goes from one dtype to another
    dtype = draw(st.sampled_from(dtypes))
    calls = []
    for turn in range(splits):
        lengths = []
        for _ in range(count):
            queries = keys = draw(SIZES) // (1 if splits == 1 else 2)
            if cross:
                keys = draw(SIZES)
                if causal and turn:  # a query cannot leave out keys that are already in the state
                    queries = min(queries, keys)
            lengths.append((queries, keys))
        own = draw(st.sampled_from(dtypes)) if mixed else dtype
        usable = ["torch", "native"] if own is not torch.float64 and native.available() else ["torch"]
        if (kernel == "nearfar" and gradients) or (
            not normalize and kernel in LOG_WEIGHTED
        ):  # refused by the native engine
            usable = ["auto"]
        calls.append(Call(tuple(lengths), own, draw(st.sampled_from(usable))))
    batch = draw(st.sampled_from([(), (1,), (1,), (2,), (2,), (2,), (2,), (2, 1), (2, 1), (0,)]))
    forget = draw(st.sampled_from([None, "log_decay", "gate"])) if linear and causal else None
    return Case(
        kernel=kernel,
        calls=tuple(calls),
        batch=batch,
        kv_heads=draw(st.sampled_from([1, 1, 2, 3])),
        groups=draw(st.sampled_from([1, 1, 2, 3])),
        causal=causal,
        packed=packed,
        normalize=normalize,
        mask=draw(st.sampled_from([None, None, "left", "right", "holes", "few", "poison", "none"])),
        forget=forget,
        # The gradient of a gate near 0 is divided by it, and strong decay could leave a row only keys of similarity 0.
        strong=kernel not in SOME_FEATURES_VANISH and not (gradients and forget == "gate") and draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.3])),
        shared_keys=batch == (2,) and draw(st.integers(0, 4)) == 0,
        heads_last=draw(st.booleans()),
        gradients=gradients,
        seed=draw(st.integers(0, 2**20)),
    )


@dataclass
class Inputs:
    """Tensors of one call: query (.., heads, L, D), key, value (.., kv heads, S, ..), forget (.., kv heads, S)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    forget: Tensor | None

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.query, self.key, self.value, self.forget) if x is not None]


def make_inputs(case: Case) -> list[Inputs]:
    """Leaves in the dtype of their call."""
    generator = torch.Generator().manual_seed(case.seed)
    found = []
    for call in case.calls:
        L, S = (sum(pair[i] for pair in call.lengths) for i in (0, 1))
        key_batch = (1,) if case.shared_keys else case.batch

        def tokens(*shape: int, dtype: torch.dtype = call.dtype) -> Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
            return x.transpose(-2, -3).contiguous().transpose(-2, -3) if case.heads_last else x

        query = tokens(*case.batch, case.kv_heads * case.groups, L, DIM)
        key = tokens(*key_batch, case.kv_heads, S, DIM)
        value = tokens(*key_batch, case.kv_heads, S, 5)
        mask = None if case.mask is None else make_mask(case, S, generator)
        if mask is not None and case.mask == "poison" and not case.shared_keys:
            hidden = ~mask[..., None, :, None]
            key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)
        forget = None if case.forget is None else make_forget(case, S, generator, call.dtype)
        inputs = Inputs(query, key, value, mask, forget)
        for x in inputs.leaves():
            x.requires_grad_(case.gradients)
        found.append(inputs)
    return found


def make_mask(case: Case, S: int, generator: torch.Generator) -> Tensor:
    """(.., S), True where a key is visible."""
    places = torch.arange(S).expand(*case.batch, S)
    edge = torch.randint(0, S + 1, (*case.batch, 1), generator=generator)
    if case.mask == "left":
        return places >= edge
    if case.mask == "right":
        return places < edge
    share = {"holes": 0.7, "poison": 0.7, "few": 0.05, "none": 0.0}[str(case.mask)]
    return torch.rand(*case.batch, S, generator=generator) < share


def make_forget(case: Case, S: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """(.., kv heads, S): log_decay <= 0, or gate in (0, 1]; some of them forget nothing at all."""
    shape = (*case.batch, case.kv_heads, S)
    drawn = torch.rand(*shape, generator=generator, dtype=torch.float64)
    log = -30 * drawn.square() if case.strong else -0.2 * drawn
    if case.forget == "gate" and not case.strong:
        log = (0.95 - 0.4 * drawn).log()
    if case.forget == "log_decay" or case.kernel not in SOME_FEATURES_VANISH:
        log = log.masked_fill(torch.rand(*shape, generator=generator) < 0.2, 0)
    kept = torch.float32 if dtype in HALF else dtype
    return (log if case.forget == "log_decay" else log.exp()).to(kept)


def run(case: Case, kernel: Kernel, inputs: list[Inputs]) -> list[Tensor]:
    """Outputs of the calls, each going on from the state of the one before.

    A call may refuse a state of another dtype, in words; then the outputs end there.
    """
    outputs: list[Tensor] = []
    state = None
    for i, (call, own) in enumerate(zip(case.calls, inputs, strict=False)):
        options: dict[str, Any] = {"kernel": kernel, "is_causal": case.causal, "scale": case.scale}
        options |= {"enable_gqa": case.groups > 1, "engine": call.engine, "key_mask": own.mask}
        if not case.normalize:
            options["normalize"] = False
        if case.forget is not None:
            options[case.forget] = own.forget
        if case.packed:
            bounds = [torch.tensor([0, *(pair[i] for pair in call.lengths)]).cumsum(0) for i in (0, 1)]
            same = torch.equal(*bounds) and case.seed % 2 == 0
            options["cu_seqlens"] = bounds[0] if same else tuple(bounds)
        wants_state = i + 1 < len(case.calls) or (case.seed % 3 == 0 and case.kernel != "nearfar")
        try:
            out = linattn.attention(own.query, own.key, own.value, state=state, return_state=wants_state, **options)
        except ValueError as error:
            if i and call.dtype is not case.calls[i - 1].dtype and "the state is" in str(error):
                break
            raise
        out, state = out if wants_state else (out, None)
        outputs.append(out)
    return outputs


@dataclass
class Expected:
    """What the twin found, in float64.

    rows: (.., heads, L, M). condition: (.., heads, L), by how much a row enlarges the rounding of its features;
    slope: the same for gradients, which are divided by the denominator once more.
    """

    rows: Tensor
    condition: Tensor
    slope: Tensor


def twin(case: Case, kernel: Kernel, inputs: list[Inputs]) -> list[Expected]:
    """What `run` should return, by the definition: every packed sequence by itself, every query with every key before it."""
    found: list[list[Expected]] = [[] for _ in case.calls]
    for sequence in range(len(case.calls[0].lengths)):
        past: list[Inputs] = []
        for call, own, parts in zip(case.calls, inputs, found, strict=False):
            starts = [sum(pair[i] for pair in call.lengths[:sequence]) for i in (0, 1)]
            here = cut(own, *starts, *call.lengths[sequence])
            past.append(here)
            parts.append(attend(case, kernel, here.query, *join(past)))
    return [
        Expected(
            torch.cat([part.rows for part in parts], -2),
            torch.cat([part.condition for part in parts], -1),
            torch.cat([part.slope for part in parts], -1),
        )
        for parts in found
    ]


def cut(own: Inputs, first_query: int, first_key: int, L: int, S: int) -> Inputs:
    """One packed sequence in float64; what is masked is set to 0, because it may hold NaN."""
    at = slice(first_key, first_key + S)
    key, value = own.key[..., at, :].double(), own.value[..., at, :].double()
    mask = None if own.mask is None else own.mask[..., at]
    if mask is not None:
        hidden = ~mask[..., None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    forget = None if own.forget is None else own.forget[..., at].double()
    return Inputs(own.query[..., first_query : first_query + L, :].double(), key, value, mask, forget)


def join(past: list[Inputs]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values, mask and forgetting of all calls so far."""
    key, value = (torch.cat([getattr(one, name) for one in past], -2) for name in ("key", "value"))
    mask, forget = (
        None if getattr(past[0], name) is None else torch.cat([getattr(one, name) for one in past], -1)
        for name in ("mask", "forget")
    )
    return key, value, mask, forget


def attend(
    case: Case, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, forget: Tensor | None
) -> Expected:
    """out_i = sum_j w_ij v_j / sum_j w_ij, with w_ij = sim(q_i, k_j) g_j f_(j+1) .. f_i over the keys j that i may see.

    f is the decay or the gate, and g_j = 1 - gate_j or 1. The last query is aligned with the last key.
    """
    L, S = query.shape[-2], key.shape[-2]
    key, value = (x.repeat_interleave(case.groups, -3) for x in (key, value))
    place = torch.arange(L) + S - L if case.causal else torch.full((L,), S - 1)  # of the last key that each query sees
    visible = torch.arange(S) <= place[:, None]
    if mask is not None:
        visible = visible & mask[..., None, None, :]
    log_weight, factor = torch.zeros(L, S, dtype=torch.float64), torch.ones(S, dtype=torch.float64)
    if forget is not None:
        log_f = forget if case.forget == "log_decay" else forget.log()
        if mask is not None:  # a masked token is as if it were not there: it does not decay the sums either
            log_f = log_f.masked_fill(~mask[..., None, :], 0)
        until = torch.cat([log_f.new_zeros(*log_f.shape[:-1], 1), log_f.cumsum(-1)], -1).repeat_interleave(
            case.groups, -2
        )
        log_weight = until[..., (place + 1).clamp_min(0)][..., None] - until[..., None, 1:]
        if case.forget == "gate":
            factor = (1 - forget).repeat_interleave(case.groups, -2)[..., None, :]
    if case.kernel in QUADRATIC:
        scale = DIM**-0.5 if case.scale is None else case.scale
        log_weight = log_weight + query @ key.mT * scale
        similarity = size = torch.ones_like(log_weight)
        largest = torch.ones(())
    else:
        features = kernel.query_features(query, scale=case.scale), kernel.key_features(key, scale=case.scale)
        similarity, size = features[0] @ features[1].mT, features[0].abs() @ features[1].abs().mT
        largest = size.detach().amax() if size.numel() else torch.ones(())
    shape = np.broadcast_shapes(log_weight.shape, similarity.shape, visible.shape, factor.shape)
    log_weight = log_weight.expand(shape).masked_fill(~visible, -torch.inf)
    if case.normalize and S:  # a factor of the whole row cancels: keep the exponentials in range
        top = log_weight.detach().amax(-1, keepdim=True)
        log_weight = log_weight - top.masked_fill(top == -torch.inf, 0)
    weight = similarity * factor * log_weight.exp()
    mass = (size * factor * log_weight.exp()).detach().sum(-1)
    total = weight.sum(-1, keepdim=True)
    if not case.normalize:
        return Expected(weight @ value, mass.clamp_min(1), torch.ones_like(mass))
    empty = (total.detach().abs() <= 1e-14 * mass[..., None]) | (mass[..., None] == 0)
    rows = (weight / total.masked_fill(empty, 1)).masked_fill(empty, 0) @ value
    denominator = total.detach()[..., 0].abs()
    condition = (mass / denominator).masked_fill(empty[..., 0], torch.inf).masked_fill(mass == 0, 1)
    slope = (largest * log_weight.detach().exp().sum(-1) / denominator).masked_fill(mass == 0, 1)
    return Expected(rows, condition, slope)
