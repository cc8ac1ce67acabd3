"""Native training with states in 16 and 8 bits: gradients pass straight through the rounding, as in the torch engine."""

import pytest
import torch

from linattn import NearFar, attention
from native_support import isa, needs_native
from nearfar_support import CAUSAL, SMALL, tensors
from nearfar_training_support import check as check_training
from nearfar_training_support import error, run, weights

pytestmark = needs_native
__all__ = ["isa"]

HALF = {**SMALL, "state_bits": 16}
OPTIONS = {
    "plain": {},
    "cap": {"logit_cap": 1.5},
    "budgets": {"slots": [8, 32]},
    "one head without slots": {"slots": [0, 24]},
    "no sinks": {"sinks": 0},
    "more sinks than a block": {"sinks": 20, "block": 6},
    "no window": {"window": 0},
}


def exact_tokens(N, **sizes):
    """Tokens of dim 16: the root of their scale is 1/2, so that both engines round the same numbers."""
    return tensors(N, dim=16, **sizes)


def check(tokens, options, tolerance=2e-4, **how):
    """The last bit of a slot may differ: the engines sum in different orders and precisions."""
    check_training(tokens, options, tolerance, out_tolerance=1e-4, **how)


@pytest.mark.parametrize("name", OPTIONS)
def test_as_the_torch_engine(isa, name):
    check(exact_tokens(150), {**HALF, **OPTIONS[name]}, state_weights=False)


@pytest.mark.parametrize(("N", "value_dim"), [(44, 1), (65, 17), (131, 64)])
def test_odd_sizes(isa, N, value_dim):
    check(exact_tokens(N, value_dim=value_dim), HALF, state_weights=False)


@pytest.mark.parametrize("name", ["plain", "cap", "budgets"])
@pytest.mark.parametrize("lengths", [[150], [100, 50], [1, 2, 60, 1, 1, 85], [149, 1]])
def test_through_a_state(name, lengths):
    """Gradients of a state in 16 bits have 16 bits themselves."""
    check(exact_tokens(150), {**HALF, **OPTIONS[name]}, 2e-3, lengths=lengths)


def test_more_blocks_than_one_segment():
    tokens = exact_tokens(900, batch=1, heads=2, kv_heads=1)
    check(tokens, {"window": 30, "slots": 40, "block": 16, "sinks": 2, "state_bits": 16}, state_weights=False)


def test_masks_with_nan_behind_them():
    q, k, v = exact_tokens(160, batch=3)
    mask = torch.rand(3, 160, generator=torch.Generator().manual_seed(3)) > 0.2
    mask[0, :40], mask[1, 70:130] = False, False
    hidden = ~mask[:, None, :, None]
    how = {"mask": mask, "state_weights": False}
    out, grads = run([x.masked_fill(hidden, torch.nan) for x in (q, k, v)], HALF, "native", **how)
    expected, wide = run((q, k, v), HALF, "torch", **how)
    assert error(out, expected) < 1e-4
    for got, want in zip(grads, wide, strict=True):
        assert error(got, want) < 2e-4
        assert not got[hidden.expand_as(got)].any()


def test_a_state_is_in_half_precision_and_has_gradients():
    tokens = [x.requires_grad_() for x in exact_tokens(150)]
    out, state = attention(*tokens, kernel=NearFar(**HALF), return_state=True, engine="native", **CAUSAL)
    assert state.near.dtype == state.slots.dtype == state.sink.dtype == torch.float16
    assert state.near.requires_grad
    assert state.slots.requires_grad
    assert not state.received.requires_grad
    grads = torch.autograd.grad((out * weights(out)).sum() + state.slots.float().square().sum(), tokens)
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in grads)


@pytest.mark.parametrize("name", OPTIONS)
def test_8_bits(isa, name):
    """Without a state, which carries no gradient in 8 bits."""
    found, kernel = [], NearFar(**{**SMALL, "state_bits": 8, **OPTIONS[name]})
    for engine, dtype in (("native", torch.float32), ("torch", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in exact_tokens(150)]
        out = attention(*leaves, kernel=kernel, engine=engine, **CAUSAL)
        found.append([out, *torch.autograd.grad((out * weights(out)).sum(), leaves)])
    for got, expected in zip(*found, strict=True):
        assert error(got, expected) < 2e-2  # the last bit of a slot may differ


def test_overflow_says_so():
    q, k, v = (x.requires_grad_() for x in exact_tokens(150))
    with pytest.raises(ValueError, match="up to 65504"):
        attention(q, k * 1e6, v, kernel=NearFar(**HALF), engine="native", **CAUSAL)
