"""The functions that take the place of mamba_ssm's and causal_conv1d's: equal to transformers' own fallbacks."""

import pytest
import torch

import scan_support as support
from linattn.hf.hybrids import conv, scan
from scan_support import close, conv_inputs, scan_inputs

modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")


def unwrapped(function):
    """The fallback itself, without the warning that it is one."""
    return getattr(function, "__wrapped__", function)


@pytest.fixture
def theirs(monkeypatch):
    monkeypatch.setattr(modeling.logger, "warning_once", lambda *_: None)
    return modeling


def test_scan_and_its_update(theirs):
    named = {name: x.float() for name, x in scan_inputs(2, 20, 16, 40, channels_last=True, without=("state",)).items()}
    named["B"], named["C"] = named["B"][:, 0], named["C"][:, 0]
    u, delta, A, B, C = (named.pop(name) for name in ("u", "delta", "A", "B", "C"))
    options = {**named, "delta_softplus": True, "return_last_state": True}
    expected, state = unwrapped(theirs.mamba_selective_scan)(u, delta, A, B, C, **options)
    out, last = scan.selective_scan_fn(u, delta, A, B, C, **options)
    close(out, expected, 1e-5)
    close(last, state, 1e-5)
    token = (
        u[..., 0],
        delta[..., 0],
        A,
        B[..., 0],
        C[..., 0],
        named["D"],
        named["delta_bias"],
        True,
        named["z"][..., 0],
    )
    expected = unwrapped(theirs.mamba_selective_state_update)(state, *token)
    close(scan.selective_state_update(last, *token), expected, 1e-5)
    close(last, state, 1e-5)


@pytest.mark.parametrize("held", [3, 4])
def test_convolution_and_its_update(theirs, held):
    named = {name: x.float() for name, x in conv_inputs(2, 20, 40, 4, channels_last=True).items()}
    x, weight, bias = named["x"], named["weight"], named["bias"]
    expected = unwrapped(theirs.causal_conv1d_fn)(x, weight, bias, "silu")
    close(conv.causal_conv1d_fn(x, weight, bias, "silu", seq_idx=None), expected, 1e-5)
    state = support.draw(2, 20, held, seed=5).float()
    mine = state.clone()
    expected = unwrapped(theirs.causal_conv1d_update)(x[..., :1], state, weight, bias, "silu")
    close(conv.causal_conv1d_update(x[..., :1], mine, weight, bias, "silu"), expected, 1e-5)
    assert torch.equal(mine, state)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_state_shorter_than_the_convolution_is_refused(tokens):
    """Native code would read beyond it; transformers' own convolution has no output for it either."""
    named = {name: x.float() for name, x in conv_inputs(2, 20, tokens, 4, channels_last=True).items()}
    state = torch.zeros(2, 20, 2)
    with pytest.raises(ValueError, match="holds 2 inputs of a convolution that reaches back 3"):
        conv.causal_conv1d_update(named["x"], state, named["weight"], named["bias"], "silu")
