"""Gradients of causal near/far attention by the native engine, against the torch engine in float64."""

from contextlib import suppress

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from linattn import NearFar, attention
from linattn.engines.native.ffi import ISA_LEVELS, library
from native_support import isa, needs_native
from nearfar_support import CAUSAL, SMALL, tensors
from nearfar_training_support import check, error, run, table, weights

pytestmark = needs_native
__all__ = ["isa"]


OPTIONS = {
    "plain": {},
    "cap": {"logit_cap": 1.5},
    "ALiBi": {"alibi_slopes": [0.5, 0.1, 0.02, 0.004]},
    "table": {"position_bias": table(25)},
    "table and cap": {"position_bias": table(7), "logit_cap": 2.0},
    "budgets": {"slots": [8, 32]},
    "one head without slots": {"slots": [0, 24]},
    "no sinks": {"sinks": 0},
    "more sinks than a block": {"sinks": 20, "block": 6},
    "blocks of one": {"block": 1, "window": 5},
    "no window": {"window": 0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_as_the_torch_engine(isa, name):
    check(tensors(60 if name == "blocks of one" else 150), {**SMALL, **OPTIONS[name]})


@pytest.mark.parametrize(
    ("N", "dim", "value_dim"), [(44, 1, 1), (65, 7, 17), (130, 33, 5), (131, 16, 64), (97, 80, 33)]
)
def test_odd_sizes(isa, N, dim, value_dim):
    check(tensors(N, dim=dim, value_dim=value_dim), SMALL)


def test_more_blocks_than_one_segment():
    check(tensors(1500, batch=1, heads=2, kv_heads=1), {"window": 30, "slots": 40, "block": 16, "sinks": 2})


@pytest.mark.parametrize("lengths", [[100, 50], [1, 2, 60, 1, 1, 85], [20, 130], [149, 1]])
@pytest.mark.parametrize("name", ["plain", "cap", "table", "budgets"])
def test_through_a_state(name, lengths):
    check(tensors(150), {**SMALL, **OPTIONS[name]}, lengths=lengths)


@pytest.mark.parametrize("lengths", [[160], [110, 50]])
def test_masks_and_left_padding_with_nan_behind_them(isa, lengths):
    q, k, v = tensors(160, batch=3)
    mask = torch.rand(3, 160, generator=torch.Generator().manual_seed(3)) > 0.2
    mask[0, :40], mask[1, 70:130] = False, False
    hidden = ~mask[:, None, :, None]
    poisoned = [x.masked_fill(hidden, torch.nan) for x in (q, k, v)]
    how = {"lengths": lengths, "mask": mask, "state_weights": False}
    out, grads = run(poisoned, SMALL, "native", **how)
    expected, wide = run((q, k, v), SMALL, "torch", **how)
    assert error(out, expected) < 1e-5
    for got, want in zip(grads, wide, strict=True):
        assert error(got, want) < 1e-4
        assert not got[hidden.expand_as(got)].any()


@pytest.mark.parametrize(("L", "S"), [(30, 200), (120, 200), (200, 120)])
def test_unequal_lengths(L, S):
    found = []
    for engine, dtype in (("native", torch.float32), ("torch", torch.float64)):
        q, k, v = (x.to(dtype) for x in tensors(200))
        leaves = [x.requires_grad_() for x in (q[:, :, 200 - L :], k[:, :, 200 - S :], v[:, :, 200 - S :])]
        out = attention(*leaves, kernel=NearFar(**SMALL), engine=engine, **CAUSAL)
        found.append(torch.autograd.grad((out * weights(out)).sum(), leaves))
    for got, want in zip(*found, strict=True):
        assert error(got, want) < 1e-4


def test_a_state_without_gradients_and_the_gradient_of_a_state_alone():
    q, k, v = tensors(150)
    kernel, found = NearFar(**SMALL), []
    for engine, dtype in (("native", torch.float32), ("torch", torch.float64)):
        first, rest = ([x[:, :, cut].to(dtype) for x in (q, k, v)] for cut in (slice(0, 90), slice(90, 150)))
        with torch.no_grad():
            _, state = attention(*first, kernel=kernel, return_state=True, engine=engine, **CAUSAL)
        leaves = [x.requires_grad_() for x in rest]
        _, after = attention(*leaves, kernel=kernel, state=state, return_state=True, engine=engine, **CAUSAL)
        assert not any(getattr(after, name).requires_grad for name in ("received", "near_received", "moments"))
        total = (after.near * weights(after.near)).sum() + after.slots.square().sum() + after.bias.sum()
        found.append(torch.autograd.grad(total, leaves[1:]))
    for got, want in zip(*found, strict=True):
        assert error(got, want) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gets_gradients_in_half_precision(dtype):
    given = [x.to(dtype) for x in tensors(150)]
    leaves = [x.clone().requires_grad_() for x in given]
    out = attention(*leaves, kernel=NearFar(**SMALL), engine="native", **CAUSAL)
    grads = torch.autograd.grad((out * weights(out)).sum(), leaves)
    wide = [x.double().requires_grad_() for x in given]
    expected = attention(*wide, kernel=NearFar(**SMALL), engine="torch", **CAUSAL)
    for got, want in zip(grads, torch.autograd.grad((expected * weights(out).double()).sum(), wide), strict=True):
        assert got.dtype == dtype
        assert error(got, want) < 2e-2


def test_strides_threads_and_memory_that_was_nan():
    packed = torch.randn(2, 150, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    way = torch.randn(2, 150, 4, 8, generator=torch.Generator().manual_seed(1)).transpose(1, 2)

    def gradients(tokens):
        leaves = [x.detach().requires_grad_() for x in tokens]
        return torch.autograd.grad(attention(*leaves, kernel=NearFar(**SMALL), engine="native", **CAUSAL), leaves, way)

    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    expected, before = gradients([x.contiguous() for x in views]), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    torch.set_num_threads(3)
    try:
        found = gradients(views)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_packed_sequences():
    tokens = tensors(230, batch=1)
    found = []
    for engine, dtype in (("native", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tokens]
        out = attention(*leaves, kernel=NearFar(**SMALL), cu_seqlens=[0, 100, 130, 230], engine=engine, **CAUSAL)
        found.append(torch.autograd.grad((out * weights(out)).sum(), leaves))
    for got, want in zip(*found, strict=True):
        assert error(got, want) < 1e-4


@given(
    window=st.integers(0, 40),
    slots=st.lists(st.integers(0, 30), min_size=2, max_size=2),
    sinks=st.integers(0, 6),
    block=st.integers(1, 20),
    groups=st.integers(1, 3),
    dim=st.integers(2, 20),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    cap=st.sampled_from([None, 2.0]),
    reach=st.integers(0, 12),
    masked=st.booleans(),
    level=st.sampled_from(ISA_LEVELS),
)
@settings(max_examples=25, deadline=None)
def test_any_options(window, slots, sinks, block, groups, dim, lengths, cap, reach, masked, level):
    N, before = sum(lengths), library.isa
    tokens = tensors(N, heads=2 * groups, kv_heads=2, dim=dim, value_dim=dim + 1, seed=N)
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(N)) > 0.3 if masked else None
    options = {"window": window, "slots": slots, "sinks": sinks, "block": block, "logit_cap": cap}
    if 0 < reach <= window + 1:
        options["position_bias"] = table(reach, heads=2 * groups)
    with suppress(ValueError):  # a CPU that has less is tested with the best it has
        library.set_isa(level)
    try:
        how = {"lengths": lengths, "mask": mask, "state_weights": mask is None}
        out, grads = run(tokens, options, "native", **how)
        expected, wide = run(tokens, options, "torch", **how)
        assume(error(out, expected) < 1e-4)  # where costs agree to the last bits, the engines may merge different pairs
        for got, want in zip(grads, wide, strict=True):
            assert error(got, want) < 1e-3
    finally:
        library.set_isa(before)


def test_refusals_say_why():
    q, k, v = (x.requires_grad_() for x in tensors(120))
    native = {"engine": "native", "enable_gqa": True}
    with pytest.raises(ValueError, match="recall or without is_causal is trained through torch's own operators"):
        attention(q, k, v, kernel="nearfar", **native)
    with pytest.raises(ValueError, match="with recall or without is_causal is trained"):
        attention(q, k, v, kernel=NearFar(recall=1), is_causal=True, **native)
    _, state = attention(q, k, v, kernel=NearFar(**SMALL), is_causal=True, return_state=True, **native)
    state.moments.requires_grad_()
    with pytest.raises(ValueError, match="statistics of this state want gradients"):
        attention(q, k, v, kernel=NearFar(**SMALL), is_causal=True, state=state, **native)


def test_second_derivatives_name_the_torch_engine():
    q, k, v = (x.requires_grad_() for x in tensors(120))
    out = attention(q, k, v, kernel=NearFar(**SMALL), engine="native", **CAUSAL)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match='engine="torch"'):
        grad.sum().backward()
