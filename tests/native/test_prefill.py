"""The short way of plain calls: bit by bit what the long way gives, and the long way wherever it cannot serve."""

import pytest
import torch

import linattn
from linattn.engines.native import plans
from linattn.kernels import Elu, Positive
from native_support import DIM, KERNELS, isa, kernels, needs_native, tokens

pytestmark = needs_native
__all__ = ["isa"]


def both_ways(q, k, v, kernel, **options):
    """A call that leaves no state may go the short way; one that does goes the long one."""
    with torch.no_grad():
        plain = linattn.attention(q, k, v, kernel=kernel, engine="native", **options)
        return plain, linattn.attention(q, k, v, kernel=kernel, engine="native", return_state=True, **options)[0]


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_gives_the_same_bits(isa, name, dtype, is_causal):
    q, k, v = (
        x.to(dtype) for x in (tokens(2, 6, 130, DIM), tokens(2, 3, 130, DIM, seed=1), tokens(2, 3, 130, 16, seed=2))
    )
    got, expected = both_ways(q, k, v, KERNELS[name](), is_causal=is_causal, enable_gqa=True)
    assert got.dtype == dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(2, 70, 3, DIM), (2, 3, DIM, 70), (1, 3, 70, DIM)])
def test_tokens_may_lie_anywhere(shape):
    order = {(2, 70, 3, DIM): (0, 2, 1, 3), (2, 3, DIM, 70): (0, 1, 3, 2), (1, 3, 70, DIM): (0, 1, 2, 3)}[shape]
    q, k, v = (tokens(*shape, seed=i).permute(order).expand(2, 3, 70, DIM) for i in range(3))
    for is_causal in (False, True):
        got, expected = both_ways(q, k, v, Positive(DIM, features=33), is_causal=is_causal)
        assert torch.equal(got, expected)


def test_it_is_taken_and_forgets_shapes_it_has_seen(monkeypatch):
    taken = []
    monkeypatch.setattr(
        plans.library, "linear_forward", lambda *a, go=plans.library.linear_forward: taken.append(1) or go(*a)
    )
    monkeypatch.setattr(plans, "MOST_SHAPES", 3)
    kernel = Elu(DIM)
    for length in (1, 2, 3, 4, 5, 4, 1):
        q = tokens(1, 2, length, DIM)
        got, expected = both_ways(q, q, q, kernel)
        assert torch.equal(got, expected)
    assert len(taken) == 7


def test_what_it_cannot_serve_goes_the_long_way(monkeypatch):
    monkeypatch.setattr(plans.library, "linear_forward", None)  # to be called would be an error
    kernel, q = Positive(DIM, features=8), tokens(1, 2, 9, DIM)
    attend = linattn.attention
    options = {"kernel": kernel, "engine": "native"}
    assert attend(q.clone().requires_grad_(), q, q, **options).requires_grad
    assert attend(q, q, q, key_mask=torch.ones(1, 9, dtype=torch.bool), **options).shape == q.shape
    assert attend(q[:, :, :4], q, q, is_causal=True, **options).shape == (1, 2, 4, DIM)
    assert attend(q[0], q[0], q[0], **options).shape == (2, 9, DIM)
    assert attend(q[:, :, :0], q, q, **options).shape == (1, 2, 0, DIM)
    with pytest.raises(ValueError, match="scale"):
        attend(q, q, q, scale=-1.0, **options)
    with pytest.raises(ValueError, match="enable_gqa"):
        attend(q, q[:, :1], q[:, :1], **options)


def test_numbers_that_are_not_finite_are_named():
    q = tokens(1, 2, 9, DIM)
    with pytest.raises(ValueError, match="key must be finite"):
        linattn.attention(q, q.clone().fill_(torch.nan), q, kernel=Positive(DIM, features=8), engine="native")
