"""Causal near/far attention of the native engine in torch.compile: one node, with its gradient."""

import shutil

import pytest
import torch

from linattn import NearFar, attention
from linattn.nearfar import autograd
from native_support import needs_native
from nearfar_support import CAUSAL, SMALL, tensors
from nearfar_training_support import error, nodes_of, table, weights

pytestmark = needs_native

OPTIONS = {
    "plain": {},
    "ALiBi": {"alibi_slopes": [0.5, 0.1, 0.02, 0.004]},
    "table and cap": {"position_bias": table(7), "logit_cap": 2.0},
    "budgets": {"slots": [8, 32]},
    "16 bits": {"state_bits": 16},
    "8 bits": {"state_bits": 8},
}


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_the_operators_as_torch_checks_them(bits):
    q, k, v = (x.requires_grad_() for x in tensors(60))
    numbers = [0], [20, 20], [24, 3, 16, 4], [1.0, 0.6, 0.0], bits
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(3)) > 0.2
    torch.library.opcheck(autograd.forward, (q, k, v, None, None, [], *numbers, True, True, True))
    torch.library.opcheck(autograd.forward, (q, k, v, mask, None, [], *numbers, True, False, True))


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("plain", False),
        ("budgets", True),
        ("ALiBi", False),
        ("table and cap", True),
        ("16 bits", False),
        ("16 bits", True),
        ("8 bits", True),
    ],
)
def test_compile_sees_one_node_and_its_gradient(name, masked):
    kernel, tokens = NearFar(**{**SMALL, **OPTIONS[name]}), tensors(150)
    mask = torch.rand(2, 150, generator=torch.Generator().manual_seed(3)) > 0.2 if masked else None

    def function(q, k, v):
        return attention(q * 2, k, v, kernel=kernel, key_mask=mask, engine="native", **CAUSAL)

    leaves = [x.requires_grad_() for x in tokens]
    out, nodes = nodes_of(function, *leaves)
    assert nodes == ["nearfar"]
    expected = function(*leaves)
    assert error(out, expected) < 1e-6
    found = [torch.autograd.grad((x * weights(x)).sum(), leaves) for x in (out, expected)]
    assert all(error(x, y) < 1e-6 for x, y in zip(*found, strict=True))
    with torch.no_grad():
        assert nodes_of(function, *leaves)[1] == ["nearfar"]


@pytest.mark.parametrize(
    ("name", "train"), [("plain", False), ("plain", True), ("16 bits", False), ("16 bits", True), ("8 bits", False)]
)
def test_compile_returns_a_state_and_other_lengths(train, name):
    kernel = NearFar(**{**SMALL, **OPTIONS[name]})

    def function(q, k, v):
        return attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for N in (150, 40, 161):
        leaves = [x.requires_grad_(train) for x in tensors(N)]
        (out, state), (expected, eager) = compiled(*leaves), function(*leaves)
        assert error(out, expected) < 1e-6
        for field, x in eager.tensors().items():
            torch.testing.assert_close(state.tensors()[field], x, msg=field)
        if train:
            sums = [x.square().sum() + s.near.sum() + s.slots.sum() for x, s in ((out, state), (expected, eager))]
            found = [torch.autograd.grad(x, leaves) for x in sums]
            assert all(error(x, y) < 1e-6 for x, y in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch's compiler needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, about torch itself
def test_compile_to_machine_code():
    torch._dynamo.reset()
    kernel, leaves = NearFar(**SMALL), [x.requires_grad_() for x in tensors(150)]

    def function(q, k, v):
        return attention(q.cos(), k, v, kernel=kernel, **CAUSAL).square()

    out, expected = torch.compile(function, fullgraph=True)(*leaves), function(*leaves)
    assert error(out, expected) < 1e-5
    found = [torch.autograd.grad(x.sum(), leaves) for x in (out, expected)]
    assert all(error(x, y) < 1e-5 for x, y in zip(*found, strict=True))
