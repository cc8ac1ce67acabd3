"""Measures: formulas against torch's own counter, fidelity against its definition, time and memory against known loads."""

import sys
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import linattn
from conftest import DIM, KERNELS, qkv
from linattn import measure
from linattn.measure.compare import Row, compare, crossover, exponent


def counted_flops(kernel, tokens, is_causal):
    query, key, value = qkv(tokens, batch=(1,), heads=1, value_dim=6, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal, engine="torch")
    return counter.get_total_flops()


@pytest.mark.parametrize("name", KERNELS)
def test_flops_are_what_torch_counts(name):
    kernel = KERNELS[name]()
    formula = measure.cost(kernel, 512, DIM, 6).flops
    extra = 0
    if name == "custom":
        extra = 512 * 2 * 2 * DIM * 12  # products inside the user's function, which no formula knows
    if getattr(kernel, "precondition", None) is not None:
        extra = 512 * 2 * 2 * DIM * DIM  # the balancing map
    assert counted_flops(kernel, 512, False) == formula + extra
    causal = measure.cost(kernel, 512, DIM, 6, is_causal=True).flops + extra
    assert causal <= counted_flops(kernel, 512, True) <= 1.25 * causal  # passing sums from chunk to chunk comes on top


def test_softmax_flops_are_what_torch_counts():
    query, key, value = qkv(64, batch=(1,), heads=1, dtype=torch.float32, value_dim=DIM)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it does not look into fused kernels
        torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert counter.get_total_flops() == measure.cost("softmax", 64, DIM, DIM).flops


def test_near_far_is_measured_like_the_others():
    query, key, value = qkv(400, dtype=torch.float32)
    exact = measure.fidelity(query, key, value, linattn.NearFar(slots=400), True)
    assert exact.relative_error < 1e-5
    assert exact.row_l1 < 1e-4
    pooled = measure.fidelity(query, key, value, linattn.NearFar(window=16, slots=16, block=16), True)
    assert 0 < pooled.relative_error < pooled.baseline.relative_error
    assert pooled.nonpositive == 0
    small, large = (measure.cost(linattn.NearFar(), n, 64, 64, is_causal=True) for n in (100_000, 200_000))
    assert large.flops == pytest.approx(2 * small.flops, rel=0.01)
    _, state = linattn.attention(*qkv(1000, dtype=torch.float32), kernel="nearfar", is_causal=True, return_state=True)
    assert state.nbytes / 4 == pytest.approx(measure.cost("nearfar", 1000, DIM, 5, is_causal=True).state_bytes, rel=0.1)


def test_cost_grows_linearly_and_states_do_not():
    small, large = (measure.cost("positive", n, 64, 64, is_causal=True) for n in (1000, 100_000))
    assert large.flops == 100 * small.flops
    assert large.state_bytes == small.state_bytes == 4 * 256 * 65
    assert measure.cost("softmax", 2000, 64, 64).state_bytes == 4 * 2000 * 128
    with pytest.raises(ValueError, match="sizes must not be negative, got -1 tokens"):
        measure.cost("elu", -1, 8, 8)


@pytest.mark.parametrize("is_causal", [False, True])
def test_fidelity_is_its_definition(is_causal):
    query, key, value = qkv(50)
    kernel = linattn.kernels.Positive(DIM, 64)
    report = measure.fidelity(query, key, value, kernel, is_causal)
    visible = torch.ones(50, 50, dtype=torch.bool).tril() if is_causal else torch.ones(50, 50, dtype=torch.bool)
    softmax = (query @ key.mT / DIM**0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    phi = (kernel.query_features(query) @ kernel.key_features(key).mT) * visible
    rows = phi / phi.sum(-1, keepdim=True)
    plain = visible / visible.sum(-1, keepdim=True).double()
    difference = (rows - softmax) @ value
    assert report.relative_error == pytest.approx((difference.norm() / (softmax @ value).norm()).item())
    assert report.row_l1 == pytest.approx((rows - softmax).abs().sum(-1).mean().item())
    assert report.bad_rows == (difference.norm(dim=-1) > (softmax @ value).norm(dim=-1)).double().mean().item()
    assert report.baseline.row_l1 == pytest.approx((plain - softmax).abs().sum(-1).mean().item())
    assert report.baseline.relative_error == pytest.approx(
        (((plain - softmax) @ value).norm() / (softmax @ value).norm()).item()
    )


def test_fidelity_of_exact_is_perfect_and_of_plain_trig_is_not():
    query, key, value = (torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    perfect = measure.fidelity(query, key, value, "softmax")
    assert (perfect.relative_error, perfect.row_l1, perfect.bad_rows, perfect.nonpositive) == (0, 0, 0, 0)
    with pytest.warns(UserWarning, match="is for study"):
        kernel = linattn.kernels.Trig(64, normalize=False)
    report = measure.fidelity(query, key, value, kernel)
    assert report.nonpositive > 0.3
    assert report.relative_error > 2 * report.baseline.relative_error
    assert measure.fidelity(query, key, value, linattn.kernels.Trig(64)).nonpositive == 0


def test_timing_times():
    found = measure.timing(lambda: time.sleep(0.02), seconds=0.05)
    assert 0.02 <= found.best <= found.median < 0.2
    assert found.repeats >= 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux's /proc")
def test_peak_memory_sees_what_a_call_takes():
    measure.peak_memory(lambda: torch.ones(1))
    taken = measure.peak_memory(lambda: torch.ones(64, 2**20).sum())  # 256 MiB, freed before the call returns
    assert 250 * 2**20 < taken < 350 * 2**20


def rows(*speeds):
    return [Row("k", "e", 2**i, 1.0, speed, None) for i, speed in enumerate(speeds)]


def test_crossover_is_where_the_speed_up_stays_above_one():
    assert crossover(rows(0.5, 0.5, 0.5)) is None
    assert crossover(rows(2, 3, 4)) == 1
    assert crossover(rows(0.25, 4)) == pytest.approx(2**0.5)
    assert crossover(rows(2, 0.25, 4, 8)) == pytest.approx(2 * 2**0.5)


def test_exponent_is_the_slope():
    quadratic = [Row("k", "e", n, 3e-9 * n**2, 1.0, None) for n in (10, 100, 1000, 10000)]
    assert exponent(quadratic) == pytest.approx(2)
    assert exponent(quadratic[:1]) is None


@pytest.mark.parametrize(("is_causal", "least", "most"), [(True, 0.25, 0.4), (False, 0.6, 0.8)])
def test_compare_shows_that_near_far_is_an_approximation(is_causal, least, most):
    """Gaussian keys do not cluster; docs/what-approximation-costs-you.md has the figures of eight heads."""
    result = compare([2048], ["nearfar"], engines=["torch"], heads=1, is_causal=is_causal, seconds=0.001)
    assert least < result.rows[0].relative_error < most
    assert result.rows[0].relative_error < result.rows[0].baseline_error


def test_compare_measures_every_kernel_at_every_length():
    result = compare([32, 64], ["elu", linattn.kernels.Positive(16, 8)], heads=2, dim=16, backward=True, seconds=0.001)
    assert [(row.kernel.split("(")[0], row.tokens) for row in result.rows] == [
        ("elu", 32), ("Positive", 32), ("elu", 64), ("Positive", 64),
    ]  # fmt: skip
    assert all(row.seconds > 0 and row.relative_error > 0 for row in result.rows)
    assert [entry["kernel"].split("(")[0] for entry in result.summary()] == ["softmax", "elu", "Positive"]
