"""Decayed sums on their own: the quadratic form, other implementations, long sequences."""

from dataclasses import replace

import pytest
import torch

from linattn.ops.decayed_sums import chunk
from linattn.ops.decayed_sums.call import DecayedSumsCall
from rules_support import assert_same, make


def test_equals_the_masked_product():
    """out = scale (q k^T * exp(sum of log-decays between)) v, from nothing."""
    inputs = make("sums", 100, "head")
    passed = inputs.log_decay.cumsum(-1)
    weights = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).tril().exp().tril()
    expected = inputs.scale * (inputs.query @ inputs.key.mT * weights) @ inputs.value
    out, _ = replace(inputs, state=torch.zeros_like(inputs.state)).run("chunk")
    assert_same({"out": out}, {"out": expected})


def test_mamba2():
    """x dt is the value, B the key, C the query, A dt the log-decay; heads of a group share B and C."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    inputs = make("sums", 90, "head", heads=(2, 2, 4), dtype=torch.float32)
    dt = torch.rand(2, 90, 4) + 0.1
    A = -torch.rand(4) - 0.1
    x = inputs.value.transpose(1, 2)
    expected, final = modeling.mamba2_chunk_scan(
        x,
        dt,
        A,
        inputs.key.transpose(1, 2),
        inputs.query.transpose(1, 2),
        chunk_size=16,
        initial_states=inputs.state.mT,
        return_final_states=True,
    )
    case = replace(inputs, value=(x * dt.unsqueeze(-1)).transpose(1, 2), log_decay=(dt * A).transpose(1, 2), scale=1.0)
    out, last = case.run("chunk")
    assert_same({"out": out, "final": last}, {"out": expected.transpose(1, 2), "final": final.mT}, 1e-5)


def test_a_million_equal_tokens():
    """float32 sums by chunks: the state is the number of tokens times the product, and with a decay its geometric sum."""
    tokens = 2**20
    one = torch.ones(1, 1, tokens, 1)
    third = one / 3
    out, final = chunk.decayed_sums(DecayedSumsCall(one, one, third))
    assert abs(final.item() * 3 / tokens - 1) < 1e-4
    g = torch.full((1, 1, 2**16), -1e-3)
    one, third = one[:, :, : 2**16], third[:, :, : 2**16]
    _, decayed = chunk.decayed_sums(DecayedSumsCall(one, one, third, g))
    assert decayed.item() == pytest.approx(1 / 3 / -torch.expm1(torch.tensor(-1e-3)).item(), rel=1e-4)
    assert torch.isfinite(out).all()
