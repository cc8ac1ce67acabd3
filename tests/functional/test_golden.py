"""Worked examples of the mathematics, and errors that are in print elsewhere and must not be here."""

import math

import torch

import linattn
from conftest import assert_close


def test_argmax_attention():
    query = torch.tensor([[1.0, 1, 2]], requires_grad=True)
    key = torch.tensor([[1.0, 2, 0], [0, 3, 4], [5, 0, 0], [0, 0, 1]], requires_grad=True)
    value = torch.tensor([[2.0, 0, 1], [1, 4, 3], [0, -1, 4], [1, 0, -1]])
    scores = query @ key.T
    assert scores.tolist() == [[3, 11, 5, 2]]
    picked = torch.nn.functional.one_hot(scores.argmax(-1), 4).float() @ value
    assert picked.tolist() == [[1, 4, 3]]
    # It is softmax at temperature zero, and there the gradients vanish.
    out = linattn.attention(query, key, value, kernel="softmax", scale=100.0)
    assert_close(out, picked)
    for gradient in torch.autograd.grad(out.sum(), (query, key)):
        assert gradient.abs().max() < 1e-6


def test_the_variance_of_a_dot_product_is_the_dimension():
    generator = torch.Generator().manual_seed(0)
    for dim in (4, 64, 256):
        products = (torch.randn(2, 40000, dim, generator=generator)).prod(0).sum(-1)
        assert abs(products.var().item() / dim - 1) < 0.05
        assert abs(products.mean().item()) < 5 * math.sqrt(dim / 40000)
        shifted = (torch.randn(2, 40000, dim, generator=generator) + 0.5).prod(0).sum(-1)
        assert abs(shifted.mean().item() / (dim * 0.25) - 1) < 0.1  # E[q.k] = |mu|^2


def test_softmax_is_a_gaussian_kernel_times_two_norms():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 100, 16, generator=generator, dtype=torch.float64)
    sigma2 = math.sqrt(16)
    gaussian = (-(q - k).square().sum(-1) / (2 * sigma2)).exp()
    norms = ((q.square().sum(-1) + k.square().sum(-1)) / (2 * sigma2)).exp()
    assert_close(norms * gaussian, ((q * k).sum(-1) / math.sqrt(16)).exp())


def test_associativity_is_the_whole_point():
    """phi(Q) (phi(K)^T V) / (phi(Q) . Z), by hand, is what the library computes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 50, 8, generator=generator, dtype=torch.float64)
    kernel = linattn.kernels.Positive(8, 32)
    phi_q, phi_k = kernel.query_features(q), kernel.key_features(k)
    S, Z = phi_k.T @ v, phi_k.sum(0)
    out, state = linattn.attention(q, k, v, kernel=kernel, return_state=True)
    assert_close(out, phi_q @ S / (phi_q @ Z)[:, None])
    assert_close(state.S[0] * state.log_scale.exp()[0], S)
    assert_close(state.Z[0] * state.log_scale.exp()[0], Z)


def test_sums_over_a_prefix_are_the_causal_state():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 40, 8, generator=generator, dtype=torch.float64)
    kernel = linattn.kernels.Elu()
    phi_q, phi_k = kernel.query_features(q), kernel.key_features(k)
    S = (phi_k[:, :, None] * v[:, None]).cumsum(0)
    Z = phi_k.cumsum(0)
    rows = (phi_q[:, None] @ S)[:, 0] / (phi_q * Z).sum(-1, keepdim=True)
    assert_close(linattn.attention(q, k, v, kernel=kernel, is_causal=True), rows)


def test_centring_the_keys_changes_no_softmax():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 40, 8, generator=generator, dtype=torch.float64)
    assert_close(
        linattn.attention(q, k + 3.0, v, kernel="softmax"),
        linattn.attention(q, k, v, kernel="softmax"),
    )


def test_a_masked_key_is_out_of_the_denominator_too():
    """Masking V alone, as several libraries do, leaves the padding in the denominator and shrinks every output."""
    q, k, v = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 10, 4), torch.ones(1, 1, 10, 2)
    mask = torch.arange(10)[None] < 5
    assert_close(linattn.attention(q, k, v, kernel="elu", key_mask=mask), torch.ones(1, 1, 1, 2))
