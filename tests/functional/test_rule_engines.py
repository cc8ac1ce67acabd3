"""The update rules through the public functions: gradients of the native engine, and single tokens."""

import pytest
import torch

import linattn
from linattn.functional.decayed_sums import decayed_sums
from linattn.states import RecurrentState
from native_support import needs_native
from rules_support import assert_same, make, results, tokens


@needs_native
@pytest.mark.parametrize("rule", ["delta", "sums"])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_the_native_engine_has_gradients(rule, decay):
    """Outputs, state and all gradients, through the public plumbing."""
    inputs = make(rule, 150, decay, heads=(2, 1, 4), mask=True, dtype=torch.float32)
    expected = results(inputs.map(lambda x: x.double()), "reference")
    leaves = inputs.map(lambda x: x.clone().requires_grad_())
    name = "delta_rule" if rule == "delta" else "decayed_sums"
    start = RecurrentState(name, leaves.state, torch.zeros(2, 4, dtype=torch.int64))
    options = {"log_decay": leaves.log_decay, "scale": 0.3, "enable_gqa": True, "key_mask": inputs.mask, "state": start}
    if rule == "delta":
        options |= {"beta": leaves.beta, "normalize_qk": True, "return_state": True}
    call = linattn.delta_rule if rule == "delta" else decayed_sums
    out, state = call(leaves.query, leaves.key, leaves.value, **options, engine="native")
    loss = out.double().sin().sum() + state.S.double().cos().sum()
    grads = torch.autograd.grad(loss, list(leaves.tensors().values()))
    got = {"out": out, "final": state.S, **dict(zip(leaves.tensors(), grads, strict=True))}
    assert_same(got, expected, 3e-4)


@pytest.mark.parametrize("rule", ["delta", "sums"])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("heads", [(2, 2, 2), (2, 1, 4), (4, 2, 2)])
def test_single_tokens_equal_the_definition(rule, decay, heads):
    """The decode fast path where there is a native step, the torch form elsewhere; the state given is left as it was."""
    inputs = make(rule, 6, decay, heads=heads, dtype=torch.float32)
    expected, last = inputs.map(lambda x: x.double()).run("reference")
    name = "delta_rule" if rule == "delta" else "decayed_sums"
    state = RecurrentState(name, inputs.state, torch.zeros(2, heads[2], dtype=torch.int64))
    rows = []
    for t in range(6):
        one, before = inputs.tokens(t, t + 1), state.S.clone()
        options = {"log_decay": one.log_decay, "scale": 0.3, "enable_gqa": True, "state": state}
        if rule == "delta":
            options |= {"beta": one.beta, "normalize_qk": True, "return_state": True}
        previous = state
        row, state = (linattn.delta_rule if rule == "delta" else decayed_sums)(one.query, one.key, one.value, **options)
        assert torch.equal(previous.S, before)
        rows.append(row)
    assert_same({"out": torch.cat(rows, 2), "final": state.S}, {"out": expected, "final": last}, 1e-5)
    assert (state.tokens == 6).all()


@needs_native
def test_single_tokens_are_checked_too():
    q, k, v, gates = tokens(1, T=1, dtype=torch.float32)
    _, state = linattn.delta_rule(q, k, v, **gates, return_state=True)
    with pytest.raises(ValueError, match="log_decay must not be NaN or above 0"):
        linattn.delta_rule(q, k, v, beta=gates["beta"], log_decay=1 - gates["log_decay"], state=state)
    with pytest.raises(ValueError, match="value must be finite"):
        linattn.delta_rule(q, k, v * torch.inf, **gates, state=state)
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        linattn.delta_rule(q[:, :1], k, v, **gates, state=state)
