"""Fuzzing: random calls in every combination that the library allows, against an O(N^2) twin in float64.

Kernels x forms (full, causal, cross lengths, groups of heads) x decay and gates x key masks x packing x splits into calls
with a state x dtypes x engines; outputs, and gradients for a third of the cases. What is drawn, and the twin, are in
tests/fuzz_support.py. CI draws the same cases every time, other ones for each kernel. To look for more:

    LINATTN_FUZZ=20 pytest tests/functional/test_fuzz.py        # 20 times as many cases, other ones each time
"""

import os
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

import linattn
from fuzz_support import KERNELS, TOLERANCE, Case, Expected, cases, cut, join, make_inputs, run, twin

MORE = int(os.environ.get("LINATTN_FUZZ", "0"))
CASES = 200  # of each kernel
settings.register_profile(
    "linattn-ci",
    max_examples=CASES * max(1, MORE),
    derandomize=MORE == 0,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
fuzzed = settings(settings.get_profile("linattn-ci"))


def tolerance(case: Case) -> float:
    """A state carries the rounding of the coarsest dtype so far."""
    return max(TOLERANCE[call.dtype] for call in case.calls)


def check_rows(case: Case, got: torch.Tensor, expected: Expected, largest: float) -> None:
    """Each row within its tolerance; rows whose denominator is lost in rounding are left out."""
    assert got.shape == expected.rows.shape
    within = expected.rows.abs() < torch.finfo(got.dtype).max  # sums that are not divided may be beyond float16
    assert bool((got.isfinite() | ~within).all())
    got = torch.where(within, got.double(), expected.rows)
    allowed = tolerance(case) * expected.condition * max(largest, 1e-30)
    error = (got - expected.rows).abs().amax(-1) if got.numel() else torch.zeros(())
    wrong = (error > allowed) & (tolerance(case) * expected.condition < 0.05)
    assert not wrong.any(), (
        f"off by {error[wrong].max():.3g}, allowed {allowed[wrong].min():.3g}, rows {wrong.nonzero()}"
    )


@pytest.mark.parametrize("name", KERNELS)
def test_a_call_equals_its_definition(name):
    check = fuzzed(given(cases(name))(check_case))
    if MORE == 0:
        seed(zlib.crc32(name.encode()))(check)
    check()


def check_case(case: Case) -> None:
    kernel = KERNELS[case.kernel]()
    inputs = make_inputs(case)
    outputs, expected = run(case, kernel, inputs), twin(case, kernel, inputs)
    largest = max(
        (float(x.value.detach().nan_to_num(0, 0, 0).abs().max()) for x in inputs if x.value.numel()), default=0.0
    )
    for call, got, want in zip(case.calls, outputs, expected, strict=False):
        assert got.dtype is call.dtype
        check_rows(case, got.detach(), want, largest)
    if case.gradients:
        check_gradients(case, inputs, outputs, expected, largest)


def check_gradients(case: Case, inputs, outputs, expected, largest: float) -> None:
    """Gradients of a random sum over all outputs, with respect to every input of every call."""
    conditions = [x for want in expected for x in (want.condition, want.slope / 20) if x.numel()]
    worst = max([1.0, *(float(x.max()) for x in conditions)])
    if worst > 100:  # rounding decides
        return
    generator = torch.Generator().manual_seed(case.seed + 1)
    weights = [torch.randn(want.rows.shape, generator=generator, dtype=torch.float64) for want in expected]
    leaves = [x for own in inputs for x in own.leaves()]
    got = gradients(sum((out.double() * w).sum() for out, w in zip(outputs, weights, strict=False)), leaves)
    want = gradients(sum((one.rows * w).sum() for one, w in zip(expected, weights, strict=False)), leaves)
    for mine, right in zip(got, want, strict=False):
        assert mine.shape == right.shape
        assert bool(mine.isfinite().all())
        if right.numel():
            size = float(right.abs().max()) + largest
            error = float((mine.double() - right.double()).abs().max())
            allowed = 5 * tolerance(case) * worst * size
            assert error <= allowed, f"gradient {tuple(right.shape)} off by {error:.3g}, allowed {allowed:.3g}"


def gradients(total, leaves):
    """Zeros where the sum does not depend on an input."""
    if not (isinstance(total, torch.Tensor) and total.requires_grad):
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found, strict=False)]


POOLED = linattn.NearFar(window=6, slots=5, sinks=2, block=4)


@fuzzed
@given(cases("nearfar", self_attention=True))
def test_near_far_that_pools_is_the_same_however_it_is_split_and_packed(drawn):
    """Pooling has no O(N^2) twin: each sequence by itself, in one call, stands for it. In float64, because rounding may
    decide which of two pairs of slots is merged."""
    calls = tuple(replace(call, dtype=torch.float64, engine="torch") for call in drawn.calls)
    case = replace(drawn, calls=calls, gradients=False)
    inputs = make_inputs(case)
    outputs = run(case, POOLED, inputs)
    for sequence in range(len(calls[0].lengths)):
        parts = []
        for call, own in zip(calls, inputs, strict=False):
            start = sum(length for length, _ in call.lengths[:sequence])
            parts.append((start, cut(own, start, start, *call.lengths[sequence])))
        key, value, mask, _ = join([part for _, part in parts])
        query = torch.cat([part.query for _, part in parts], -2)
        options = {"is_causal": True, "scale": case.scale, "key_mask": mask, "enable_gqa": case.groups > 1}
        alone = linattn.attention(query, key, value, kernel=POOLED, engine="torch", **options)
        done = 0
        for out, (start, part) in zip(outputs, parts, strict=False):
            length = part.query.shape[-2]
            got, want = out[..., start : start + length, :], alone[..., done : done + length, :]
            assert got.shape == want.shape
            if part.mask is not None:  # rows of masked tokens are 0 once keys are pooled, and exact before
                got, want = (x.masked_fill(~part.mask[..., None, :, None], 0) for x in (got, want))
            assert torch.allclose(got, want, rtol=0, atol=1e-9)
            done += length
