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


def plain_decay(a, weights):
    """(B, T, H, D or 1)."""
    channels = a.dim() == 4
    scale, x = weights.decay_scale[:, None], a + weights.decay_bias if channels else (a + weights.decay_bias)[..., None]
    return (weights.bound * (-scale * x).sigmoid() if weights.bound else scale * F.softplus(x)).exp()


def plain_delta_layer(mixed, b, a, gate, weights, key_heads, conv_bias=None):
    H, M = gate.shape[2:]
    mixed = torch.cat(mixed, -1) if isinstance(mixed, tuple) else mixed
    x = convolve(mixed, weights.filters, conv_bias)
    D = (x.shape[-1] - H * M) // (2 * key_heads)
    query, key, value = x.split([key_heads * D, key_heads * D, H * M], -1)
    query, key = (
        F.normalize(y.unflatten(-1, (key_heads, D)), dim=-1).repeat_interleave(H // key_heads, 2) for y in (query, key)
    )
    value, beta, decay = value.unflatten(-1, (H, M)), b.sigmoid(), plain_decay(a, weights)
    state, out = torch.zeros(len(x), H, D, M, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, :, None]
        read = torch.einsum("bhd,bhdm->bhm", key[:, t], state)
        written = (value[:, t] - read) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * written[:, :, None]
        out.append(torch.einsum("bhd,bhdm->bhm", query[:, t], state) * D**-0.5)
    act = gate.sigmoid() if weights.sigmoid else F.silu(gate)
    return F.rms_norm(torch.stack(out, 1), (M,), weights.norm, weights.eps) * act, state


def delta_inputs(tokens, key_heads, heads, dim, value_dim, width, bound=0.0, channels=False):
    """channels: a decay of each channel, the sigmoid as gate and three tensors of rows, as in KDA."""
    keys, values = key_heads * dim, heads * value_dim
    rows = draw(2, tokens, 2 * keys + 2 * values + 3)  # as a projection leaves them: all side by side
    mixed, gate = rows[..., : 2 * keys + values], rows[..., 2 * keys + values : -3].unflatten(-1, (heads, value_dim))
    b, a = draw(2, tokens, 2 * heads, seed=1).split([heads, heads], -1)
    decays = (heads, dim) if channels else (heads,)
    weights = LayerWeights(
        draw(width, 2 * keys + values, seed=2),
        -draw(heads, seed=3).abs(),
        draw(*decays, seed=4),
        draw(value_dim, seed=5),
        1e-3,
        bound,
        channels,
    )
    if channels:
        mixed, a = mixed.split([keys, keys, values], -1), draw(2, tokens, heads, dim, seed=6)
    return mixed, b, a, gate, weights, key_heads


def part(inputs, place):
    """Some tokens of delta_inputs."""
    mixed, *others = inputs[:4]
    mixed = tuple(x[:, place] for x in mixed) if isinstance(mixed, tuple) else mixed[:, place]
    return mixed, *(x[:, place] for x in others)


def wide(inputs):
    return [
        type(x)(*wide(x))
        if hasattr(x, "_fields")
        else tuple(wide(x))
        if isinstance(x, tuple)
        else x.double()
        if isinstance(x, torch.Tensor)
        else x
        for x in inputs
    ]


@pytest.mark.parametrize(
    ("tokens", "key_heads", "heads", "dim", "value_dim", "width", "bound", "channels"),
    [
        (1, 1, 1, 16, 16, 4, 0.0, False),
        (33, 2, 4, 32, 16, 4, 0.0, False),
        (70, 1, 5, 16, 48, 2, -5.0, False),
        (1100, 3, 3, 48, 32, 3, 0.0, False),
        (1, 1, 1, 16, 16, 4, 0.0, True),
        (33, 2, 2, 32, 32, 4, 0.0, True),
        (70, 1, 5, 16, 48, 2, -5.0, True),
        (1100, 3, 3, 48, 48, 3, 0.0, True),
    ],
)
def test_delta_layer(isa, tokens, key_heads, heads, dim, value_dim, width, bound, channels):
    inputs = delta_inputs(tokens, key_heads, heads, dim, value_dim, width, bound, channels)
    out, final = delta_layer(*inputs)
    expected, state = plain_delta_layer(*wide(inputs))
    near(out, expected)
    near(final, state)
    if tokens > 20:  # the same in two calls, the first of which ends within a chunk
        first = part(inputs, slice(0, 19))
        past, final = delta_layer(*first, *inputs[4:])
        history = (torch.cat(first[0], -1) if channels else first[0])[:, 1 - width :].contiguous()
        out, final = delta_layer(*part(inputs, slice(19, None)), *inputs[4:], LayerPast(history, final))
        near(torch.cat([past, out], 1), expected)
        near(final, state)


def step_inputs(key_heads, heads, dim, value_dim, width, held, bound=0.0, channels=False):
    """What tokens of delta_inputs look like one by one: (mixed, b, a, gate) by token, the weights, and empty states."""
    inputs = delta_inputs(5, key_heads, heads, dim, value_dim, width, bound, channels)
    weights, steps = inputs[4], []
    for t in range(5):
        mixed, b, a, gate = part(inputs, t)
        steps.append((mixed, *(x.unflatten(1, (key_heads, -1)) for x in (b, a)), gate.flatten(1)))
    count = 2 * key_heads * dim + heads * value_dim
    conv_bias = draw(count, seed=6) if held == width else None
    own = (-weights.decay_scale).log(), weights.decay_bias, *weights[3:]
    step_weights = StepWeights(weights.filters.t().contiguous(), conv_bias, *own)
    wider = torch.zeros(2, count + 1, held)  # its batch entries are farther apart than they are long
    return inputs, conv_bias, steps, step_weights, wider[:, 1:], torch.zeros(2, heads, dim, value_dim)


@pytest.mark.parametrize(
    ("key_heads", "heads", "dim", "value_dim", "width", "held", "bound", "channels"),
    [
        (1, 1, 16, 16, 4, 4, 0.0, False),
        (2, 4, 24, 40, 4, 3, 0.0, False),
        (3, 3, 7, 5, 2, 3, -5.0, False),
        (1, 6, 128, 128, 3, 3, 0.0, False),
        (1, 1, 16, 16, 4, 4, 0.0, True),
        (2, 4, 24, 40, 4, 3, -5.0, True),
        (3, 3, 7, 5, 2, 3, 0.0, True),
        (6, 6, 128, 128, 3, 3, 0.0, True),
    ],
)
def test_delta_layer_step(isa, key_heads, heads, dim, value_dim, width, held, bound, channels):
    sizes = key_heads, heads, dim, value_dim, width, held, bound, channels
    inputs, conv_bias, steps, weights, conv_state, state = step_inputs(*sizes)
    out = torch.stack([delta_layer_step(*step, weights, key_heads, conv_state, state) for step in steps], 1)
    expected, last = plain_delta_layer(*wide(inputs), None if conv_bias is None else conv_bias.double())
    near(out, expected.flatten(2))
    near(state, last)
    mixed = torch.cat(inputs[0], -1) if channels else inputs[0]
    assert torch.equal(conv_state, mixed[:, -held:].transpose(1, 2))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("spoilt", ["mixed", "b", "a"])
def test_a_step_that_is_not_finite_keeps_the_state(isa, channels, spoilt):
    """Of its own batch entry; the other one moves on as if it were alone."""
    _, _, steps, weights, conv_state, state = step_inputs(2, 2, 16, 16, 4, 4, channels=channels)
    delta_layer_step(*steps[0], weights, 2, conv_state, state)
    before, expected = state.clone(), state[:1].clone()
    mixed, *others = steps[1]
    first = tuple(x[:1] for x in mixed) if channels else mixed[:1]
    alone = delta_layer_step(first, *(x[:1] for x in others), weights, 2, conv_state[:1].clone(), expected)
    bad = {"mixed": mixed[1] if channels else mixed, "b": others[0], "a": others[1]}[spoilt]
    bad[1].view(-1)[1] = float("nan")
    out = delta_layer_step(*steps[1], weights, 2, conv_state, state)
    assert out[1].isnan().all()
    assert torch.equal(state[1], before[1])
    near(out[:1], alone.double())
    near(state[:1], expected.double())


@pytest.mark.parametrize("channels", [False, True])
def test_a_token_that_is_not_finite_leaves_those_before_it(isa, channels):
    inputs = delta_inputs(70, 2, 2, 16, 16, 4, channels=channels)
    before, _ = delta_layer(*inputs)
    values = inputs[0][2] if channels else inputs[0][..., 64:]
    values[1, 41, 8] = float("nan")  # of the first head
    if channels:
        inputs[2][1, 44, 0, 3] = float("nan")  # a decay after that
    out, final = delta_layer(*inputs)
    near(out[0], before[0].double())
    near(out[1, :41], before[1, :41].double())
    near(out[1, :, 1], before[1, :, 1].double())
    assert out[1, 41:, 0].isnan().all()
    assert final[1, 0].isnan().any()


@pytest.mark.parametrize("place", range(5))
def test_shapes_are_checked_before_the_library_reads(place):
    """Of rows, b, a, the gate, and the weights."""
    inputs = list(delta_inputs(20, 2, 2, 16, 16, 4, channels=True))
    steps = list(step_inputs(2, 2, 16, 16, 4, 4, channels=True)[2:])
    steps[0] = list(steps[0][0])
    for given in (inputs, steps[0]):
        if place == 0:
            given[0] = (*given[0][:2], given[0][2][..., :-1])
        elif place < 4:
            given[place] = given[place][:, :-1]
    if place == 4:
        inputs[4] = inputs[4]._replace(decay_bias=torch.zeros(2))
        steps[1] = steps[1]._replace(dt_bias=torch.zeros(2))
    with pytest.raises(ValueError, match="of shape"):
        delta_layer(*inputs)
    with pytest.raises(ValueError, match="of shape"):
        delta_layer_step(*steps[0], steps[1], 2, *steps[2:])


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
