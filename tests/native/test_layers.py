"""Layers between their projections in one native pass against token by token in float64, on every instruction set.

The longest cases have more than two slices of 512 tokens, which threads hand over to each other.
"""

import pytest
import torch
from torch.nn import functional as F

from linattn.engines.native.delta_layer import LayerWeights, StepWeights, delta_layer, delta_layer_step
from linattn.engines.native.scan_layer import ScanWeights, scan_layer
from linattn.engines.native.strided import LayerPast
from native_support import isa, needs_native

__all__ = ["isa"]
pytestmark = needs_native


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found, expected, bound=2e-5):
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


def convolve(x, filters, bias=None):
    """x (b, T, channels), filters (width, channels): the causal convolution and silu."""
    padded = F.pad(x, (0, 0, filters.shape[0] - 1, 0))
    out = sum(row * padded[:, i : i + x.shape[1]] for i, row in enumerate(filters))
    return F.silu(out if bias is None else out + bias)


def plain_delta_layer(mixed, b, a, gate, weights, key_heads, conv_bias=None):
    filters, scale, bias, norm, eps = weights
    H, M = gate.shape[2:]
    x = convolve(mixed, filters, conv_bias)
    D = (x.shape[-1] - H * M) // (2 * key_heads)
    query, key, value = x.split([key_heads * D, key_heads * D, H * M], -1)
    query, key = (
        F.normalize(y.unflatten(-1, (key_heads, D)), dim=-1).repeat_interleave(H // key_heads, 2) for y in (query, key)
    )
    value, beta, decay = value.unflatten(-1, (H, M)), b.sigmoid(), (scale * F.softplus(a + bias)).exp()
    state, out = torch.zeros(len(x), H, D, M, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, None, None]
        read = torch.einsum("bhd,bhdm->bhm", key[:, t], state)
        written = (value[:, t] - read) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * written[:, :, None]
        out.append(torch.einsum("bhd,bhdm->bhm", query[:, t], state) * D**-0.5)
    return F.rms_norm(torch.stack(out, 1), (M,), norm, eps) * F.silu(gate), state


def delta_inputs(tokens, key_heads, heads, dim, value_dim, width):
    channels = 2 * key_heads * dim + heads * value_dim
    rows = draw(2, tokens, channels + heads * value_dim + 3)  # as a projection leaves them: all side by side
    gates = draw(2, tokens, 2 * heads, seed=1)
    weights = LayerWeights(
        draw(width, channels, seed=2), -draw(heads, seed=3).abs(), draw(heads, seed=4), draw(value_dim, seed=5), 1e-3
    )
    gate = rows[..., channels:-3].unflatten(-1, (heads, value_dim))
    return rows[..., :channels], gates[..., :heads], gates[..., heads:], gate, weights, key_heads


def wide(inputs):
    return [
        type(x)(*wide(x)) if isinstance(x, tuple) else x.double() if isinstance(x, torch.Tensor) else x for x in inputs
    ]


@pytest.mark.parametrize(
    ("tokens", "key_heads", "heads", "dim", "value_dim", "width"),
    [(1, 1, 1, 16, 16, 4), (33, 2, 4, 32, 16, 4), (70, 1, 5, 16, 48, 2), (1100, 3, 3, 48, 32, 3)],
)
def test_delta_layer(isa, tokens, key_heads, heads, dim, value_dim, width):
    inputs = delta_inputs(tokens, key_heads, heads, dim, value_dim, width)
    out, final = delta_layer(*inputs)
    expected, state = plain_delta_layer(*wide(inputs))
    near(out, expected)
    near(final, state)
    if tokens > 20:  # the same in two calls, the first of which ends within a chunk
        past, final = delta_layer(*[x[:, :19] for x in inputs[:4]], *inputs[4:])
        later = [x[:, 19:] for x in inputs[:4]]
        out, final = delta_layer(*later, *inputs[4:], LayerPast(inputs[0][:, 20 - width : 19].contiguous(), final))
        near(torch.cat([past, out], 1), expected)
        near(final, state)


def step_inputs(key_heads, heads, dim, value_dim, width, held):
    """What tokens of delta_inputs look like one by one: (mixed, b, a, gate) by token, the weights, and empty states."""
    mixed, b, a, gate, weights, _ = inputs = delta_inputs(5, key_heads, heads, dim, value_dim, width)
    b, a = (x.unflatten(-1, (key_heads, -1)) for x in (b, a))
    steps = [(mixed[:, t], b[:, t], a[:, t], gate[:, t].flatten(1)) for t in range(5)]
    conv_bias = draw(mixed.shape[-1], seed=6) if held == width else None
    filters, scale, decay_bias, norm, eps = weights
    step_weights = StepWeights(filters.t().contiguous(), conv_bias, (-scale).log(), decay_bias, norm, eps)
    wider = torch.zeros(2, mixed.shape[-1] + 1, held)  # its batch entries are farther apart than they are long
    return inputs, conv_bias, steps, step_weights, wider[:, 1:], torch.zeros(2, heads, dim, value_dim)


@pytest.mark.parametrize(
    ("key_heads", "heads", "dim", "value_dim", "width", "held"),
    [(1, 1, 16, 16, 4, 4), (2, 4, 24, 40, 4, 3), (3, 3, 7, 5, 2, 3), (1, 6, 128, 128, 3, 3)],
)
def test_delta_layer_step(isa, key_heads, heads, dim, value_dim, width, held):
    inputs, conv_bias, steps, weights, conv_state, state = step_inputs(key_heads, heads, dim, value_dim, width, held)
    out = torch.stack([delta_layer_step(*step, weights, key_heads, conv_state, state) for step in steps], 1)
    expected, last = plain_delta_layer(*wide(inputs), None if conv_bias is None else conv_bias.double())
    near(out, expected.flatten(2))
    near(state, last)
    assert torch.equal(conv_state, inputs[0][:, -held:].transpose(1, 2))


def test_a_step_that_is_not_finite_keeps_the_state(isa):
    """Of its own batch entry; the other one moves on as if it were alone."""
    _, _, steps, weights, conv_state, state = step_inputs(1, 2, 16, 16, 4, 4)
    delta_layer_step(*steps[0], weights, 1, conv_state, state)
    before, expected = state.clone(), state[:1].clone()
    alone = delta_layer_step(*(x[:1] for x in steps[1]), weights, 1, conv_state[:1].clone(), expected)
    steps[1][0][1, 40] = float("nan")
    out = delta_layer_step(*steps[1], weights, 1, conv_state, state)
    assert out[1].isnan().all()
    assert torch.equal(state[1], before[1])
    near(out[:1], alone.double())
    near(state[:1], expected.double())


def test_a_token_that_is_not_finite_leaves_those_before_it(isa):
    inputs = delta_inputs(70, 1, 2, 16, 16, 4)
    before, _ = delta_layer(*inputs)
    inputs[0][1, 41, 40] = float("nan")  # a value of the first head
    out, final = delta_layer(*inputs)
    near(out[0], before[0].double())
    near(out[1, :41], before[1, :41].double())
    near(out[1, :, 1], before[1, :, 1].double())
    assert out[1, 41:, 0].isnan().all()
    assert final[1, 0].isnan().any()


def plain_scan_layer(mixed, dt, gate, weights, heads, groups, states):
    filters, bias, A, step_bias, skip = weights
    x = convolve(mixed, filters, bias)
    x, B, C = x.split([x.shape[-1] - 2 * groups * states, groups * states, groups * states], -1)
    x = x.unflatten(-1, (heads, -1))
    B, C = (y.unflatten(-1, (groups, states)).repeat_interleave(heads // groups, 2) for y in (B, C))
    dt = F.softplus(dt + step_bias)
    state, out = torch.zeros(len(x), heads, states, x.shape[-1], dtype=x.dtype), []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None, None]
        state = state * (step * A[:, None, None]).exp() + B[:, t, :, :, None] * x[:, t, :, None] * step
        out.append(torch.einsum("bhn,bhnm->bhm", C[:, t], state) + skip[:, None] * x[:, t])
    out = torch.stack(out, 1)
    return out if gate is None else out * F.silu(gate), state


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "dim", "states", "width", "gated"),
    [
        (1, 1, 1, 16, 16, 4, True),
        (65, 6, 1, 32, 16, 4, True),
        (40, 4, 2, 16, 48, 2, False),
        (1100, 3, 3, 48, 32, 3, True),
    ],
)
def test_scan_layer(isa, tokens, heads, groups, dim, states, width, gated):
    channels = heads * dim + 2 * groups * states
    rows = draw(2, tokens, heads * dim + channels + heads)
    gate, mixed, dt = rows.split([heads * dim, channels, heads], -1)
    bias = draw(channels, seed=2) if gated else None
    A, rest = -draw(heads, seed=3).abs(), (draw(heads, seed=4), draw(heads, seed=5))
    weights = ScanWeights(draw(width, channels, seed=1), bias, A, *rest)
    inputs = mixed, dt, gate.unflatten(-1, (heads, dim)) if gated else None, weights, heads, groups, states
    out, final, squares = scan_layer(*inputs)
    expected, state = plain_scan_layer(*wide(inputs))
    near(out, expected)
    near(final, state)
    assert (squares is None) is not gated
    if squares is not None:
        near(squares, expected.square().sum(-1).transpose(1, 2))
    if tokens > 20:  # the same in two calls, the first of which ends within a chunk
        first, later = (
            [None if x is None else x[:, part] for x in inputs[:3]] for part in (slice(0, 19), slice(19, None))
        )
        before, final, _ = scan_layer(*first, *inputs[3:])
        past = LayerPast(mixed[:, 20 - width : 19].contiguous(), final)
        out, final, _ = scan_layer(*later, *inputs[3:], past)
        near(torch.cat([before, out], 1), expected)
        near(final, state)
