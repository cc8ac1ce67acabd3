"""The native steps around an update rule against their plain definitions, on every instruction set."""

import pytest
import torch
from torch.nn import functional as F

from linattn.engines.native import decayed_sums_bindings, mixer
from linattn.ops.decayed_sums.call import DecayedSumsCall
from native_support import isa, needs_native

__all__ = ["isa"]
pytestmark = needs_native
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found, expected, bound):
    assert found.shape == expected.shape
    assert float((found.double() - expected.double()).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


def plain_norm(x, gate, weight, eps, groups, gate_first, sigmoid):
    x, gate = x.double(), None if gate is None else gate.double()
    act = 1 if gate is None else torch.sigmoid(gate) if sigmoid else F.silu(gate)
    y = (x * act if gate_first else x).unflatten(-1, (groups, -1))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.double()
    return y if gate_first else y * act


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "groups"), [(7, 1), (64, 1), (96, 3), (131, 1)])
def test_gated_norm(isa, dtype, size, groups):
    weight = draw(size, seed=3) + 1
    whole = draw(2, 5, 3 * size + 4).to(dtype)  # the gate is a part of a wider projection
    x, gate = draw(2, 5, 3, size, seed=1).to(dtype), whole[..., 4:].unflatten(-1, (3, size))
    for first, sigmoid in ((False, False), (False, True), (True, False)):
        options = {"groups": groups, "gate_first": first, "sigmoid": sigmoid}
        expected = plain_norm(x, gate, weight, 1e-5, **options)
        close(mixer.gated_norm(x, gate, weight, 1e-5, wide_weight=True, **options), expected, BOUNDS[dtype])
        close(mixer.gated_norm(x, gate, weight, 1e-5, **options), expected, 3 * BOUNDS[dtype])
        apart = mixer.gated_norm(x.transpose(1, 2), gate.transpose(1, 2), weight, 1e-5, **options).transpose(1, 2)
        close(apart, expected, 3 * BOUNDS[dtype])
    close(
        mixer.gated_norm(x, None, weight, 1e-5), plain_norm(x, None, weight, 1e-5, 1, False, False), 3 * BOUNDS[dtype]
    )
    assert mixer.gated_norm(x[:0], gate[:0], weight, 1e-5).shape == (0, 5, 3, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width", "held"), [(5, 4, 4), (33, 2, 1), (64, 3, 5)])
def test_conv_step(isa, dtype, channels, width, held):
    weight, bias = draw(channels, width, seed=1), draw(channels, seed=2)
    state, x = draw(2, channels, held, seed=3).to(dtype), draw(2, channels + 3, seed=4).to(dtype)[:, 3:]
    for silu, b in ((True, bias), (False, None)):
        window = torch.cat([state, x.unsqueeze(-1)], -1)
        expected = (window[..., -width:].double() * weight).sum(-1) + (0 if b is None else b)
        mine = state.clone()
        out = mixer.conv_step(x, mine, weight, b, silu=silu)
        close(out, F.silu(expected) if silu else expected, BOUNDS[dtype])
        assert torch.equal(mine, window[..., 1:])
        assert out.dtype == dtype


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "states"), [(4, 2, 8, 16), (3, 1, 5, 7), (6, 6, 33, 20), (24, 1, 64, 128)]
)
def test_ssd_step(isa, heads, groups, dim, states):
    state, x, z = draw(2, heads, dim, states), draw(2, heads, dim, seed=1), draw(2, heads, dim, seed=2)
    dt, A, D, bias = draw(2, heads, seed=3), -draw(heads, seed=4).exp(), draw(heads, seed=5), draw(heads, seed=6)
    B, C = draw(2, 2, groups, states, seed=7).unbind(1)
    for options in ((D, z, bias, True), (None, None, None, False)):
        skip, gate, shift, softplus = options
        step = (dt if shift is None else dt + shift).double()
        step = F.softplus(step) if softplus else step.abs()
        given = dt if softplus else dt.abs()
        b, c = (y.double().repeat_interleave(heads // groups, 1) for y in (B, C))
        after = state * (step * A)[..., None, None].exp() + (step[..., None] * x)[..., None] * b[:, :, None]
        expected = (after * c[:, :, None]).sum(-1) + (0 if skip is None else skip[:, None] * x)
        mine = state.clone()
        out = mixer.ssd_step(mine, x, given, A, B, C, skip, gate, shift, softplus=softplus)
        close(out, expected if gate is None else expected * F.silu(gate), 1e-5)
        close(mine, after, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 768, 131), (3, 33, 7), (2, 1, 1), (1, 40, 4)])
def test_project(isa, dtype, rows, inputs, outputs):
    x, weight, bias = draw(rows, inputs + 2)[:, 2:], draw(outputs, inputs, seed=1).to(dtype), draw(outputs, seed=2)
    for b in (bias, None):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        close(mixer.project(x, weight, b), expected, 1e-6 * inputs**0.5)
    order = torch.randperm(outputs, generator=torch.Generator().manual_seed(3))[: outputs // 2 + 1]
    expected = F.linear(x.double(), weight[order].double(), bias[: len(order)].double())
    close(mixer.project(x, weight, bias[: len(order)], order), expected, 1e-6 * inputs**0.5)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 1, 1), (7, 33, 131), (24, 768, 64), (130, 769, 192), (61, 2060, 20), (25, 40, 385), (50, 100, 200)],
)
def test_project_many(isa, rows, inputs, outputs):
    wide, weight, bias = draw(rows, inputs + 3), draw(outputs, inputs, seed=1), draw(outputs, seed=2)
    for x, b in ((wide[:, :inputs].contiguous(), bias), (wide[:, 3:], None), (wide[:, 3:].T.contiguous().T, bias)):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        close(mixer.project_many(x, weight, b), expected, 1e-6 * inputs**0.5)
    order = torch.randperm(outputs, generator=torch.Generator().manual_seed(3))[: outputs // 2 + 1]
    expected = F.linear(wide[:, 3:].double(), weight[order].double(), bias[: len(order)].double())
    close(mixer.project_many(wide[:, 3:], weight, bias[: len(order)], order), expected, 1e-6 * inputs**0.5)
    scales = {"row_scale": draw(rows, seed=4), "input_scale": draw(inputs, seed=5)}
    x = wide[:, 3:].double() * scales["row_scale"][:, None] * scales["input_scale"]
    expected = F.linear(x, weight.double(), bias.double())
    close(mixer.project_many(wide[:, 3:], weight, bias, **scales), expected, 2e-6 * inputs**0.5)


def test_project_many_keeps_rows_apart(isa):
    """One row that is not finite, one of the weights, and one of each: all else is as without them."""
    x, weight = draw(30, 50), draw(70, 50, seed=1)
    expected = x @ weight.T
    x[3], weight[69] = float("nan"), float("inf")
    out = mixer.project_many(x, weight, None)
    assert out[3].isnan().all()
    assert not out[:, 69].isfinite().any()
    rows = [i for i in range(30) if i != 3]
    close(out[rows][:, :69], expected[rows][:, :69], 1e-5)


def test_many_threads_share_large_steps(isa):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        x, weight = draw(1, 512), draw(700, 512, seed=1)
        close(mixer.project(x, weight, None), x @ weight.T, 1e-5)
        many = draw(700, 512, seed=3)
        close(mixer.project_many(many, weight, None), many @ weight.T, 1e-5)
        close(mixer.project_many(many, weight[:100], None), many @ weight[:100].T, 1e-5)
        rows, ones = draw(300, 2, 128, seed=2), torch.ones(128)
        close(mixer.gated_norm(rows, None, ones, 1e-6), F.rms_norm(rows, (128,), eps=1e-6), 2e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
def test_decayed_sums_with_time_steps_and_skips(isa, tokens):
    """Values times their step, and the value itself added to the output: what Mamba-2 computes around the rule."""
    C, B, x = draw(2, 1, tokens, 9), draw(2, 1, tokens, 9, seed=1), draw(2, 3, tokens, 20, seed=2)
    dt, skip, state = draw(2, 3, tokens, seed=3).abs(), draw(3, seed=4), draw(4, 3, 9, 20, seed=5)
    log_decay, bounds = -dt, [0, tokens // 3, tokens]
    rest = log_decay, None, bounds, state
    plain = decayed_sums_bindings.forward(DecayedSumsCall(C, B, x * dt[..., None], *rest), False)
    fused = decayed_sums_bindings.forward(DecayedSumsCall(C, B, x, *rest), False, dt, skip)
    close(fused[0], plain[0] + skip[:, None, None] * x, 1e-5)
    close(fused[1], plain[1], 1e-5)
