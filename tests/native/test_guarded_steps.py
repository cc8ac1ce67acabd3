"""One-token steps that are recognised by guards: whatever differs from the earlier call is noticed."""

import copy
from dataclasses import replace

import pytest
import torch

import linattn
from linattn.engines.native import plans
from linattn.kernels import Elu, Positive

HEADS, DIM = 4, 16


def draw(length, seed=0, heads=HEADS):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, length, DIM, generator=g) for h in (heads, HEADS, HEADS)]


def step(kernel, state, tokens, engine="native", **options):
    return linattn.attention(
        *tokens, kernel=kernel, is_causal=True, state=state, return_state=True, engine=engine, **options
    )


@pytest.fixture(params=["positive", "elu"])
def warm(request):
    """A kernel whose steps of these shapes are known, and the state after 30 tokens."""
    kernel = Positive(DIM, features=24) if request.param == "positive" else Elu()
    _, state = linattn.attention(*draw(30), kernel=kernel, is_causal=True, return_state=True)
    for seed in (1, 2):
        step(kernel, state, draw(1, seed))
    assert plans.known_kernels[id(kernel)].guarded
    return kernel, state


def same(kernel, state, tokens, **options):
    """The native step equals the torch engine's, from a state that nothing native is known of."""
    out, new = step(kernel, state, tokens, **options)
    expected, wanted = step(kernel, copy.deepcopy(state), tokens, "torch", **options)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    sums = [x.S * x.log_scale.exp()[..., None, None] for x in (new, wanted)]
    torch.testing.assert_close(*sums, atol=1e-5, rtol=1e-4)
    return out


def test_other_shapes_strides_and_scales(warm):
    kernel, state = warm
    same(kernel, state, draw(1, 3))
    q, k, v = draw(1, 3)
    spread = torch.zeros(1, HEADS, 1, 2 * DIM)[..., ::2]
    same(kernel, state, (spread.copy_(q), k, v))
    same(kernel, state, (q, k, v.transpose(1, 2).contiguous().transpose(1, 2)))
    same(kernel, state, draw(1, 3, heads=2 * HEADS), enable_gqa=True)
    out = same(kernel, state, draw(1, 3))
    _, scaled = linattn.attention(*draw(30), kernel=kernel, is_causal=True, scale=0.7, return_state=True)
    assert not torch.allclose(same(kernel, scaled, draw(1, 3), scale=0.7), out, atol=1e-3)
    with pytest.raises(ValueError, match="scale"):
        step(kernel, state, draw(1, 3), scale=0.7)
    with pytest.raises(ValueError, match="enable_gqa"):
        step(kernel, state, draw(1, 3, heads=2 * HEADS))


def test_gradients_are_not_lost(warm):
    kernel, state = warm
    q, k, v = draw(1, 3)
    out, _ = step(kernel, state, (q, k.requires_grad_(), v))
    assert torch.autograd.grad(out.sum(), k)[0].abs().max() > 0
    with torch.no_grad():
        assert not step(kernel, state, (q, k, v))[0].requires_grad


def test_transforms_see_the_state_behind_known_tokens(warm):
    kernel, state = warm
    tokens = draw(1, 1)

    def rows(S):
        return step(kernel, replace(state, S=S), tokens, "auto")[0]

    both = torch.stack([state.S, 2 * state.S])
    torch.testing.assert_close(torch.func.vmap(rows)(both), torch.stack([rows(S) for S in both]), atol=1e-5, rtol=1e-5)
    found = torch.func.grad(lambda S: rows(S).square().sum())(state.S)
    S = state.S.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(step(kernel, replace(state, S=S), tokens, "torch")[0].square().sum(), S)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [("q", "k", "v"), (None, None, None)])
def test_what_is_no_tensor_is_refused(warm, tokens):
    kernel, state = warm
    for i in range(3):
        given = draw(1, 1)
        given[i] = tokens[i]
        with pytest.raises(TypeError, match=f"{('query', 'key', 'value')[i]} must be a tensor"):
            step(kernel, state, given)


@pytest.mark.parametrize("how", ["data", "numpy", "assigned", "in place"])
def test_a_changed_projection_is_noticed(how):
    kernel = Positive(DIM, features=24)
    _, state = linattn.attention(*draw(30), kernel=kernel, is_causal=True, return_state=True)
    before = [step(kernel, state, draw(1, 1))[0] for _ in range(3)][-1]
    if how == "data":
        kernel.projection.data = kernel.projection.data * 0.5
    elif how == "numpy":
        kernel.projection.numpy()[:] *= 0.5
    elif how == "assigned":
        kernel.projection = kernel.projection * 0.5
    else:
        kernel.projection.mul_(0.5)
    state.kernel = kernel.signature(None, DIM)  # as if the state had been made with it
    out, _ = step(kernel, state, draw(1, 1))
    assert not torch.allclose(out, before, atol=1e-4)
    torch.testing.assert_close(out, step(kernel, state, draw(1, 1), "torch")[0], atol=1e-5, rtol=1e-5)


def test_a_damaged_state_is_refused(warm):
    kernel, state = warm
    for name, bad in (("log_scale", float("nan")), ("tokens", -1), ("guarded", 2**63 - 1)):
        broken = copy.deepcopy(state)
        getattr(broken, name).fill_(bad)
        with pytest.raises(ValueError, match=f"cannot be used: its {name}"):
            step(kernel, broken, draw(1, 3))
    short = copy.deepcopy(state)
    short.Z = short.Z[..., :-1]
    with pytest.raises(ValueError, match="cannot be used"):
        step(kernel, short, draw(1, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.mul_(0.25),
        lambda x: x.neg_(),
        lambda x: x[:, 1::2].neg_(),
        lambda x: x[::2].mul_(4),
        lambda x: x.copy_(x.flip(0)),
        lambda x: x.copy_(x.roll(16, 1)),
    ],
)
def test_regular_changes_of_a_large_projection_are_noticed(change):
    """They add the same power of two to many words, or move words: a checksum must not add up to the same."""
    kernel, generator = Positive(64), torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 40, 64, generator=generator) * 0.3 for _ in range(3))
    options = {"kernel": kernel, "is_causal": True}
    linattn.attention(q, k, v, **options)
    with torch.no_grad():
        change(kernel.projection)
    out, exact = (linattn.attention(q, k, v, engine=engine, **options) for engine in ("auto", "torch"))
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)
