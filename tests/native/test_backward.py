"""The native engine's gradients, against those of the O(N^2) twin in float64, and of the torch engine."""

import itertools

import pytest
import torch
from torch.nn.functional import logsigmoid

import linattn
from linattn.kernels import Positive, Trig
from native_support import DIM, KERNELS, close, isa, kernels, native_attention, needs_native, tokens, truth

pytestmark = needs_native
__all__ = ["isa"]

TOLERANCE = 1e-5


def tolerance(name):
    """(q.k)^2 of the first rows may be all but 0: such a row's gradient is large, and no better in torch's float32."""
    return 1e-3 if name == "polynomial-bare" else TOLERANCE


def gradients(function, inputs, kernel, weight, **options):
    """Of a weighted sum of the output, by every input and every gate among the options."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    gates = {n: x.clone().requires_grad_() for n, x in options.items() if n in ("log_decay", "gate")}
    out = function(*inputs, kernel, **{**options, **gates})
    parameters = [p for p in kernel.parameters() if p.requires_grad]
    wanted = [*inputs, *gates.values(), *parameters]
    return torch.autograd.grad((out * weight.to(out.dtype)).sum(), wanted)


@kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [9, 64, 130])
def test_gradients(isa, name, is_causal, length):
    kernel = KERNELS[name]()
    inputs = tokens(1, 2, length, DIM), tokens(1, 2, length, DIM, seed=1), tokens(1, 2, length, 5, seed=2)
    weight = tokens(1, 2, length, 5, seed=7)
    got = gradients(native_attention, inputs, kernel, weight, is_causal=is_causal)
    expected = gradients(truth, inputs, kernel, weight, is_causal=is_causal)
    for x, y in zip(got, expected, strict=False):
        close(x, y, tolerance(name))


@kernels
@pytest.mark.parametrize("extra", ["mask", "log_decay", "gate"])
def test_gradients_with_masks_gates_and_groups(isa, name, extra):
    kernel = KERNELS[name]()
    inputs = tokens(2, 4, 100, DIM), tokens(2, 2, 100, DIM, seed=1), tokens(2, 2, 100, 8, seed=2)
    options = {
        "mask": {"key_mask": tokens(2, 100, seed=3) > -0.5},
        "log_decay": {"log_decay": logsigmoid(tokens(2, 2, 100, seed=4) + 2)},
        "gate": {"gate": torch.sigmoid(tokens(2, 2, 100, seed=4) + 2)},
    }[extra]
    weight = tokens(2, 4, 100, 8, seed=7)
    got = gradients(native_attention, inputs, kernel, weight, is_causal=True, **options)
    expected = gradients(truth, inputs, kernel, weight, is_causal=True, **options)
    for x, y in zip(got, expected, strict=False):
        close(x, y, tolerance(name))


@pytest.mark.parametrize("dim", [1, 16, 33])
@pytest.mark.parametrize("features", [1, 17, 96])
@pytest.mark.parametrize("value_dim", [1, 17, 64])
def test_gradients_of_ragged_sizes(isa, dim, features, value_dim):
    kernel = Positive(dim, features=features)
    inputs = tokens(1, 2, 71, dim), tokens(1, 2, 71, dim, seed=1), tokens(1, 2, 71, value_dim, seed=2)
    weight = tokens(1, 2, 71, value_dim, seed=7)
    for is_causal in (False, True):
        got = gradients(native_attention, inputs, kernel, weight, is_causal=is_causal)
        expected = gradients(truth, inputs, kernel, weight, is_causal=is_causal)
        top = max(y.abs().max().item() for y in expected)
        for x, y in zip(got, expected, strict=False):
            assert (x - y).abs().max() <= TOLERANCE * top


def run_in_parts(engine, inputs, kernel, is_causal, cuts, weight):
    """Several calls handing on a state, with a loss on the outputs and on the last state."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    state, outs = None, []
    for start, end in itertools.pairwise(cuts):
        part = [x[:, :, start:end] for x in inputs]
        options = {"kernel": kernel, "is_causal": is_causal, "engine": engine, "enable_gqa": True}
        out, state = linattn.attention(*part, state=state, return_state=True, **options)
        outs.append(out)
    rows = torch.cat(outs, 2)
    level = state.log_scale.exp()
    loss = (rows * weight).sum() + (state.S * level[..., None, None]).sum() * 0.1 + (state.Z * level[..., None]).sum()
    return torch.autograd.grad(loss, inputs)


@kernels
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_through_states(isa, name, is_causal):
    kernel = KERNELS[name]()
    inputs = tokens(1, 4, 80, DIM), tokens(1, 2, 80, DIM, seed=1), tokens(1, 2, 80, 6, seed=2)
    weight = tokens(1, 4, 80, 6, seed=7)
    got = run_in_parts("native", inputs, kernel, is_causal, [0, 30, 31, 80], weight)
    expected = run_in_parts("torch", [x.double() for x in inputs], kernel, is_causal, [0, 30, 31, 80], weight.double())
    for x, y in zip(got, expected, strict=False):
        close(x, y, tolerance(name))


def test_long_sequences_cross_segments(isa):
    """Longer than a segment between two checkpoints of the forward pass."""
    kernel = Positive(DIM, features=24)
    inputs = tokens(1, 2, 1200, DIM), tokens(1, 2, 1200, DIM, seed=1), tokens(1, 2, 1200, 8, seed=2)
    decay = logsigmoid(tokens(1, 2, 1200, seed=4) + 4)
    weight = tokens(1, 2, 1200, 8, seed=7)
    got = gradients(native_attention, inputs, kernel, weight, is_causal=True, log_decay=decay)
    expected = gradients(truth, inputs, kernel, weight, is_causal=True, log_decay=decay)
    for x, y in zip(got, expected, strict=False):
        close(x, y)


@pytest.mark.parametrize("spread", [0.01, 5.0, 15.0])
def test_gradients_of_wild_norms(isa, spread):
    kernel = Positive(DIM, features=32)
    growth = torch.linspace(0.1, spread, 150)[:, None]
    for order in (growth, growth.flip(0)):
        inputs = tokens(1, 1, 150, DIM) * 0.3, tokens(1, 1, 150, DIM, seed=1) * order, tokens(1, 1, 150, 8, seed=2)
        weight = tokens(1, 1, 150, 8, seed=7)
        for is_causal in (False, True):
            got = gradients(native_attention, inputs, kernel, weight, is_causal=is_causal)
            expected = gradients(truth, inputs, kernel, weight, is_causal=is_causal)
            for x, y in zip(got, expected, strict=False):
                close(x, y, 5e-4)


def test_masked_keys_get_no_gradient_even_with_nan(isa):
    q, k, v = tokens(1, 2, 70, DIM), tokens(1, 2, 70, DIM, seed=1), tokens(1, 2, 70, 8, seed=2)
    mask = torch.ones(1, 70, dtype=torch.bool)
    mask[:, 10:20] = False
    k[:, :, 10:20], v[:, :, 10:20] = torch.nan, torch.nan
    for is_causal in (False, True):
        for kernel in (Positive(DIM, features=24), KERNELS["elu"](), KERNELS["trig"](), KERNELS["taylor"]()):
            options = {"is_causal": is_causal, "key_mask": mask}
            grads = gradients(native_attention, (q, k, v), kernel, tokens(1, 2, 70, 8, seed=7), **options)
            assert all(g.isfinite().all() for g in grads)
            assert not grads[1][:, :, 10:20].any()
            assert not grads[2][:, :, 10:20].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(isa, dtype):
    kernel = Positive(DIM, features=24)
    inputs = [tokens(1, 2, 75, DIM, seed=s).to(dtype) for s in range(3)]
    weight = tokens(1, 2, 75, DIM, seed=7).to(dtype)
    for is_causal in (False, True):
        got = gradients(native_attention, inputs, kernel, weight, is_causal=is_causal)
        expected = gradients(truth, inputs, kernel, weight.double(), is_causal=is_causal)
        for x, y in zip(got, expected, strict=False):
            assert x.dtype == dtype
            close(x, y, 2e-2)


def test_learned_temperature(isa):
    kernel = Trig(DIM, features=21, learn_temperature=True)
    inputs = tokens(1, 2, 60, DIM), tokens(1, 2, 60, DIM, seed=1), tokens(1, 2, 60, 5, seed=2)
    weight = tokens(1, 2, 60, 5, seed=7)
    got = gradients(native_attention, inputs, kernel, weight, is_causal=True)
    expected = gradients(truth, inputs, kernel, weight, is_causal=True)
    for x, y in zip(got, expected, strict=False):
        close(x, y, TOLERANCE)
