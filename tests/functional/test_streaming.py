"""One call = any split = token by token; a state can be kept, forked, cut, rolled back and saved."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn
from conftest import DIM, KERNELS, assert_close, forgetting, qkv, tokens
from linattn.kernels import Kernel, Relu

EXACT = {"softmax": lambda: linattn.kernels.Softmax()}


def in_pieces(lengths, query, key, value, state=None, **options):
    """The rows of successive calls, and the last state."""
    rows, start = [], 0
    for length in lengths:
        part = [x[..., start : start + length, :] for x in (query, key, value)]
        cut = {n: x[..., start : start + length] if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        out, state = linattn.attention(*part, state=state, return_state=True, **cut)
        rows.append(out)
        start += length
    return torch.cat(rows, -2), state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [*KERNELS, *EXACT])
def test_any_split_gives_the_same_rows_and_state(name, dtype):
    kernel = {**KERNELS, **EXACT}[name]()
    query, key, value = qkv(140, dtype=dtype)
    mask = tokens(2, 140, seed=7) > -0.5
    for options in ({}, {"key_mask": mask}):
        options |= {"kernel": kernel, "is_causal": True}
        whole, state = linattn.attention(query, key, value, return_state=True, **options)
        for lengths in ([140], [1] * 140, [100, 40], [0, 64, 1, 75], [139, 1]):
            rows, last = in_pieces(lengths, query, key, value, **options)
            assert_close(rows, whole)
            if name not in EXACT:
                assert torch.equal(last.tokens, state.tokens)
                scale = (last.log_scale - state.log_scale).exp()[..., None]
                assert_close(last.S * scale[..., None], state.S)
                assert_close(last.Z * scale, state.Z)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(KERNELS)),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    form=st.sampled_from(["", "log_decay", "gate", "key_mask"]),
)
def test_any_split_found_by_hypothesis(name, lengths, form):
    n = sum(lengths)
    query, key, value = qkv(n)
    forget = torch.rand(2, 2, n, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 0.99 + 0.005
    options = {"key_mask": forget[:, 0] > 0.3} if form == "key_mask" else forgetting(form, forget)
    kernel = KERNELS[name]()
    whole = linattn.attention(query, key, value, kernel=kernel, is_causal=True, **options)
    rows, _ = in_pieces(lengths, query, key, value, kernel=kernel, is_causal=True, **options)
    assert_close(rows, whole, factor=100)


def test_non_causal_calls_go_on_too(kernel: Kernel):
    """A state of keys that every query of a later call sees."""
    query, key, value = qkv(60)
    _, state = linattn.attention(query, key[:, :, :25], value[:, :, :25], kernel=kernel, return_state=True)
    rest = linattn.attention(query, key[:, :, 25:], value[:, :, 25:], kernel=kernel, state=state)
    assert_close(rest, linattn.attention(query, key, value, kernel=kernel))


def test_gradients_reach_an_incoming_state(kernel: Kernel):
    query, key, value = qkv(50, grad=True)
    whole = linattn.attention(query, key, value, kernel=kernel, is_causal=True)
    rows, _ = in_pieces([20, 30], query, key, value, kernel=kernel, is_causal=True)
    weights = tokens(*whole.shape, seed=8)
    for got, want in zip(
        *(torch.autograd.grad((x * weights).sum(), (query, key, value)) for x in (rows, whole)), strict=False
    ):
        assert_close(got, want)


def test_a_state_stays_the_same_size():
    query, key, value = qkv(200)
    sizes = set()
    state = None
    for t in range(0, 200, 50):
        part = [x[:, :, t : t + 50] for x in (query, key, value)]
        _, state = linattn.attention(*part, kernel="elu", is_causal=True, state=state, return_state=True)
        sizes.add(state.nbytes)
    assert len(sizes) == 1
    assert state.nbytes == 2 * 2 * (DIM * 5 + DIM + 1 + 1 + 1) * 8


def test_clone_is_independent_and_detach_has_no_history():
    query, key, value = qkv(10, grad=True)
    _, state = linattn.attention(query, key, value, kernel="elu", is_causal=True, return_state=True)
    fork = state.clone()
    fork.S.data.zero_()
    assert state.S.abs().sum() > 0
    assert state.S.requires_grad
    assert not state.detach().S.requires_grad


def test_to_moves_floats_and_leaves_counts():
    _, state = linattn.attention(*qkv(10), kernel="elu", return_state=True)
    narrow = state.to(torch.float32)
    assert narrow.S.dtype == narrow.log_scale.dtype == torch.float32
    assert narrow.tokens.dtype == torch.int64
    assert state.to(device="cpu", dtype=torch.float32).Z.dtype == torch.float32


@pytest.mark.parametrize("name", ["positive", "elu", "softmax"])
def test_select_reorders_beams(name):
    kernel = {**KERNELS, **EXACT}[name]()
    query, key, value = qkv(40, batch=(3,))
    _, state = linattn.attention(query, key, value, kernel=kernel, is_causal=True, return_state=True)
    order = torch.tensor([2, 0, 0, 1])
    step = [x[:, :, -1:] for x in qkv(7, batch=(4,))]
    got = linattn.attention(*step, kernel=kernel, is_causal=True, state=state.select(order))
    _, expected = linattn.attention(
        query[order], key[order], value[order], kernel=kernel, is_causal=True, return_state=True
    )
    assert_close(got, linattn.attention(*step, kernel=kernel, is_causal=True, state=expected))


@pytest.mark.parametrize("form", ["", "log_decay", "gate", "key_mask"])
def test_subtracting_the_last_tokens_rolls_back(kernel: Kernel, form):
    query, key, value = qkv(60)
    forget = torch.rand(2, 2, 60, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 0.2 + 0.8
    options = {"key_mask": forget[:, 0] > 0.85} if form == "key_mask" else forgetting(form, forget)
    early = {name: x[..., :50] for name, x in options.items()}
    late = {name: x[..., 50:] for name, x in options.items()}
    first = [x[:, :, :50] for x in (query, key, value)]
    last = [x[:, :, 50:] for x in (query, key, value)]
    _, before = linattn.attention(*first, kernel=kernel, is_causal=True, return_state=True, **early)
    _, after = linattn.attention(*last, kernel=kernel, is_causal=True, return_state=True, state=before, **late)
    back = after.subtract(last[1], last[2], kernel, **late)
    assert torch.equal(back.tokens, before.tokens)
    scale = (back.log_scale - before.log_scale).exp()[..., None]
    assert_close(back.S * scale[..., None], before.S, factor=1000)
    assert_close(back.Z * scale, before.Z, factor=1000)


def test_subtract_refuses_what_it_cannot_undo():
    kernel = linattn.kernels.Elu()
    query, key, value = qkv(20)
    _, state = linattn.attention(query, key, value, kernel=kernel, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match="not the last ones of this state"):
        state.subtract(key + 5, value, kernel)
    with pytest.raises(ValueError, match=r"made by Elu\(\); Relu\(\) cannot take tokens out of it"):
        state.subtract(key, value, linattn.kernels.Relu())
    loud = key.clone()
    loud[:, :, -1] = 1e9
    _, state = linattn.attention(query, loud, value, kernel=kernel, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match=r"outweigh all earlier ones.*keep a clone\(\)"):
        state.subtract(loud[:, :, -1:], value[:, :, -1:], kernel)


def test_a_cache_drops_its_last_tokens():
    query, key, value = qkv(30)
    _, before = linattn.attention(
        *(x[:, :, :25] for x in (query, key, value)), is_causal=True, return_state=True, kernel="softmax"
    )
    _, after = linattn.attention(query, key, value, is_causal=True, return_state=True, kernel="softmax")
    assert_close(after.drop_last(5).key, before.key)
    with pytest.raises(ValueError, match="cannot drop 31 of 30 tokens"):
        after.drop_last(31)


@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("length", [1, 3, 70])
def test_masked_tokens_change_no_bit_of_a_long_stream(engine, length):
    """Long streams are rounded by chance, which must not move a sum, not even a power of two, that nothing was added to."""
    options = {"kernel": Relu(), "is_causal": True, "return_state": True, "engine": engine}
    q, k, v = (tokens(2, 3, length, 8, seed=seed, dtype=torch.float32) for seed in range(3))
    _, state = linattn.attention(q, k, v, **options)
    exponent = torch.arange(state.S.numel()).reshape(state.S.shape) % 40 - 20
    signs = torch.where(exponent % 3 == 0, -1.0, 1.0)
    for count in range(5000, 5008):
        state.S, state.Z, state.tokens = signs * 2.0**exponent, 2.0 ** exponent[..., 0], state.tokens * 0 + count
        _, after = linattn.attention(q, k, v, state=state, key_mask=torch.zeros(2, length, dtype=torch.bool), **options)
        assert torch.equal(after.S, state.S)
        assert torch.equal(after.Z, state.Z)
