"""The native engine's outputs: every kernel, every instruction set, ragged sizes, against the O(N^2) twin in float64."""

import pytest
import torch

import linattn
from conftest import forgetting
from linattn.kernels import Elu, Positive, Relu
from native_support import DIM, KERNELS, close, isa, kernels, native_attention, needs_native, tokens, truth

pytestmark = needs_native
__all__ = ["isa"]


def allowed(name):
    """More for features of both signs, where the denominator of a row with few keys may be next to nothing."""
    return {"polynomial": 1e-4, "polynomial-bare": 1e-3, "trig": 3e-5}.get(name, 1e-5)


@kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 200])
def test_outputs(isa, name, is_causal, length):
    kernel = KERNELS[name]()
    q, k, v = tokens(2, 3, length, DIM), tokens(2, 3, length, DIM, seed=1), tokens(2, 3, length, 5, seed=2)
    # Rows that see few keys divide by a polynomial's small similarity, which float32 knows to fewer digits.
    tolerance = allowed(name) if is_causal or length < 10 else 1e-5
    with torch.no_grad():
        got = native_attention(q, k, v, kernel, is_causal=is_causal)
        close(got, truth(q, k, v, kernel, is_causal=is_causal), tolerance)


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 80])
@pytest.mark.parametrize("features", [1, 15, 64, 130])
@pytest.mark.parametrize("value_dim", [1, 17, 64, 100])
def test_ragged_sizes(isa, dim, features, value_dim):
    kernel = Positive(dim, features=features)
    q, k, v = tokens(1, 2, 71, dim), tokens(1, 2, 71, dim, seed=1), tokens(1, 2, 71, value_dim, seed=2)
    for is_causal in (False, True):
        got = native_attention(q, k, v, kernel, is_causal=is_causal)
        close(got, truth(q, k, v, kernel, is_causal=is_causal))


@kernels
def test_masks_groups_and_nan_in_hidden_keys(isa, name):
    kernel = KERNELS[name]()
    q, k, v = tokens(2, 6, 90, DIM), tokens(2, 3, 90, DIM, seed=1), tokens(2, 3, 90, 8, seed=2)
    mask = tokens(2, 90, seed=3) > -0.5
    mask[0, :5], mask[1, -70:] = False, False
    poisoned_k, poisoned_v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    with torch.no_grad():
        for is_causal in (False, True):
            got = native_attention(q, poisoned_k, poisoned_v, kernel, is_causal=is_causal, key_mask=mask)
            close(got, truth(q, k, v, kernel, is_causal=is_causal, key_mask=mask))


@kernels
@pytest.mark.parametrize("form", ["log_decay", "gate"])
def test_decay(isa, name, form):
    kernel = KERNELS[name]()
    q, k, v = tokens(1, 4, 100, DIM), tokens(1, 2, 100, DIM, seed=1), tokens(1, 2, 100, 8, seed=2)
    options = forgetting(form, torch.sigmoid(tokens(1, 2, 100, seed=4) * 3))
    with torch.no_grad():
        got = native_attention(q, k, v, kernel, is_causal=True, **options)
        close(got, truth(q, k, v, kernel, is_causal=True, **options), allowed(name))


def test_every_key_is_hidden(isa):
    q = tokens(1, 2, 10, DIM)
    hidden = torch.zeros(1, 10, dtype=torch.bool)
    for is_causal in (False, True):
        for kernel in (Elu(), Positive(DIM, features=20)):
            options = {"is_causal": is_causal, "key_mask": hidden, "return_state": True}
            out, state = native_attention(q, q, q, kernel, **options)
            assert not out.any()
            assert not state.guarded.any()
            assert not state.tokens.any()


def test_guarded_rows_are_counted_like_the_torch_engine(isa):
    q, k = tokens(2, 2, 80, 3), tokens(2, 2, 80, 3, seed=1)
    mask = torch.ones(2, 80, dtype=torch.bool)
    mask[0, :9] = False
    for is_causal in (False, True):
        options = {"kernel": Relu(), "is_causal": is_causal, "key_mask": mask, "return_state": True}
        out, state = linattn.attention(q, k, k, engine="native", **options)
        expected, other = linattn.attention(q, k, k, engine="torch", **options)
        close(out, expected)
        assert state.guarded.sum() > 0
        assert torch.equal(state.guarded, other.guarded)
        assert torch.equal(state.tokens, other.tokens)


@pytest.mark.parametrize("spread", [0.01, 5.0, 30.0])
def test_norms_of_any_size(isa, spread):
    """Exponents far outside float32 must neither overflow nor vanish, in any order of the keys."""
    kernel = Positive(DIM, features=32)
    growth = torch.linspace(0.1, spread, 150)[:, None]
    for order in (growth, growth.flip(0), growth[torch.randperm(150, generator=torch.Generator().manual_seed(0))]):
        q, k, v = tokens(1, 2, 150, DIM) * 0.3, tokens(1, 2, 150, DIM, seed=1) * order, tokens(1, 2, 150, 8, seed=2)
        for is_causal in (False, True):
            close(
                native_attention(q, k, v, kernel, is_causal=is_causal),
                truth(q, k, v, kernel, is_causal=is_causal),
                2e-4,
            )


def test_later_keys_change_nothing(isa):
    kernel = Positive(DIM, features=32)
    q, k, v = tokens(1, 1, 100, DIM), tokens(1, 1, 100, DIM, seed=1), tokens(1, 1, 100, 8, seed=2)
    before = native_attention(q, k, v, kernel, is_causal=True)
    for at, factor in ((50, 2.0), (50, 60.0), (99, 30.0), (17, 200.0)):
        changed = k.clone()
        changed[:, :, at] *= factor
        after = native_attention(q, changed, v, kernel, is_causal=True)
        assert torch.equal(after[:, :, :at], before[:, :, :at])


@pytest.mark.parametrize("factor", [1e-3, 8.0, 40.0, 200.0])
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_queries_are_right_and_change_no_others(isa, is_causal, factor):
    """Their exponents are brought into range row by row, in their own block and in those after it."""
    kernel = Positive(DIM, features=32)
    q, k, v = tokens(1, 2, 300, DIM), tokens(1, 2, 300, DIM, seed=1) * 0.3, tokens(1, 2, 300, 8, seed=2)
    before = native_attention(q, k, v, kernel, is_causal=is_causal)
    large = torch.zeros(300, dtype=torch.bool)
    large[[3, 60, 61, 299]] = True
    changed = torch.where(large[:, None], q * factor, q)
    after = native_attention(changed, k, v, kernel, is_causal=is_causal)
    assert torch.equal(after[:, :, ~large], before[:, :, ~large])
    close(after, truth(changed, k, v, kernel, is_causal=is_causal), 2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["positive", "elu", "trig", "learned"])
def test_half_precision_is_widened(isa, name, dtype):
    kernel = KERNELS[name]()
    q, k, v = (tokens(2, 2, 75, DIM, seed=s).to(dtype) for s in range(3))
    with torch.no_grad():
        for is_causal in (False, True):
            got, state = native_attention(q, k, v, kernel, is_causal=is_causal, return_state=True)
            assert got.dtype == dtype
            assert state.S.dtype == torch.float32
            close(got, truth(q, k, v, kernel, is_causal=is_causal).to(dtype), 1e-2)


def test_half_precision_special_numbers(isa):
    """Every finite float16 goes in as the float32 it stands for."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    every = every[every.isfinite() & (every >= 0)][: 31744 // 16 * 16].reshape(1, 1, -1, 16)
    ones = torch.ones_like(every)
    _, state = native_attention(ones, ones, every, Elu(), return_state=True)
    close(state.S, 2 * every.double().sum(-2, keepdim=True).expand(1, 1, 16, 16))
    rows = native_attention(ones[:, :, :1], ones[:, :, :1], every[:, :, 5:6], Elu())
    assert torch.equal(rows, every[:, :, 5:6])


def test_any_strides(isa):
    kernel = Positive(DIM, features=24)
    packed = tokens(2, 70, 3, 4, DIM)  # (batch, tokens, what, heads, dim), as a projection leaves it
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    turned = tokens(2, 4, DIM, 70, seed=9).transpose(2, 3)
    for is_causal in (False, True):
        for value in (v, turned):
            close(
                native_attention(q, k, value, kernel, is_causal=is_causal),
                truth(q, k, value, kernel, is_causal=is_causal),
            )


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite(isa, which, bad):
    for length in (1, 130):
        given = {n: tokens(1, 2, length, DIM, seed=i) for i, n in enumerate(("query", "key", "value"))}
        given[which][0, 1, length // 2, 3] = bad
        for is_causal in (False, True):
            with pytest.raises(ValueError, match=f"{which} must be finite"):
                native_attention(*given.values(), Positive(DIM, features=24), is_causal=is_causal)


def test_empty_sizes(isa):
    kernel = Elu()
    for shape in ((0, 2, 5), (2, 2, 0)):
        x = tokens(*shape, DIM)
        for is_causal in (False, True):
            assert native_attention(x, x, x, kernel, is_causal=is_causal).shape == x.shape
    x = tokens(2, 0, 5, DIM)
    with pytest.raises(ValueError, match="at least one head"):
        native_attention(x, x, x, kernel)


def test_refusals_are_errors():
    x = tokens(1, 1, 4, DIM).double()
    with pytest.raises(ValueError, match="float64"):
        native_attention(x, x, x, Elu())
    assert linattn.attention(x, x, x, kernel=Elu()).dtype == torch.float64
