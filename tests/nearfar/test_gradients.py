"""Gradients of near/far attention: those of softmax while it is exact, finite differences where keys were merged."""

import pytest
import torch

from linattn import NearFar, attention
from nearfar_support import CAUSAL, SMALL, tensors


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_softmax_while_the_keys_fit(causal):
    q, k, v = tensors(47, dtype=torch.float64)
    weight = torch.randn(2, 4, 47, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = []
    for kernel in (NearFar(**SMALL), "softmax"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, kernel=kernel, is_causal=causal, enable_gqa=True)
        grads.append(torch.autograd.grad((out * weight).sum(), inputs))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_merged_keys_agree_with_finite_differences(causal):
    # The plan carries no gradient, and neither do the mean query and the metric it is made with: move keys and values only.
    q, k, v = tensors(120, heads=1, kv_heads=1, dim=3, batch=1, value_dim=2, dtype=torch.float64)
    kernel = NearFar(window=8, slots=8, sinks=2, block=8)
    weight = torch.randn(1, 1, 120, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    inputs = [k.requires_grad_(), v.requires_grad_()]
    way = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=x.dtype) for i, x in enumerate(inputs)
    ]

    def f(t):
        moved = [x + t * d for x, d in zip(inputs, way, strict=True)]
        return (attention(q, *moved, kernel=kernel, is_causal=causal) * weight).sum()

    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(f(0.0), inputs), way, strict=True))
    numeric = (f(1e-7) - f(-1e-7)) / 2e-7
    torch.testing.assert_close(slope, numeric, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("each_engine")
def test_masked_tokens_get_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors(120))
    mask = torch.ones(2, 120, dtype=torch.bool)
    mask[0, :11] = False
    attention(q, k, v, kernel=NearFar(**SMALL), key_mask=mask, **CAUSAL).square().sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
        assert (x.grad[0, :, :11] == 0).all()
        assert x.grad[0, :, 11:].abs().sum() > 0
