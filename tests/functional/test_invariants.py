"""What must hold for every kernel: causality, masks, rows that sum to one, half precision, threads."""

import itertools

import pytest
import torch

import linattn
from conftest import DIM, KERNELS, assert_close, qkv, tokens
from linattn.kernels import Kernel
from linattn.ops.linear_attention import reference as oracle


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("factor", [1000.0, 0.0, -3.0])
def test_later_keys_change_nothing_earlier(kernel: Kernel, dtype, factor):
    query, key, value = qkv(100, dtype=dtype)
    out = linattn.attention(query, key, value, kernel=kernel, is_causal=True)
    key, value = key.clone(), value.clone()
    key[:, :, -1] *= factor
    value[:, :, -1] += 7
    changed = linattn.attention(query, key, value, kernel=kernel, is_causal=True)
    assert torch.equal(changed[:, :, :-1], out[:, :, :-1])
    assert not torch.equal(changed[:, :, -1], out[:, :, -1])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padding_changes_nothing(kernel: Kernel, side, is_causal):
    """Valid outputs and gradients are those of the unpadded call; padding may hold NaN and gets no gradient."""
    query, key, value = qkv(50)
    spots = {"left": range(20, 70), "right": range(50), "holes": [i for i in range(70) if i % 7 not in (0, 3)][:50]}
    at = torch.tensor(list(spots[side]))
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[:, at] = True
    garbage = torch.nan if kernel.__class__.__name__ != "Custom" else 3.0
    padded = [
        torch.zeros(*x.shape[:2], 70, x.shape[-1], dtype=x.dtype).index_copy(2, at, x) for x in (query, key, value)
    ]
    for x in padded[1:]:
        x[:, :, ~mask[0]] = garbage
    padded = [x.requires_grad_() for x in padded]
    query, key, value = (x.requires_grad_() for x in (query, key, value))
    out = linattn.attention(*padded, kernel=kernel, key_mask=mask, is_causal=is_causal)[:, :, at]
    expected = linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal)
    assert_close(out, expected)
    weights = tokens(*expected.shape, seed=8)
    got = torch.autograd.grad((out * weights).sum(), padded)
    want = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for x, y in zip(got, want, strict=False):
        assert_close(x[:, :, at], y)
        assert x[:, :, ~mask[0]].abs().sum() == 0


@pytest.mark.parametrize("name", [*KERNELS, "softmax"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_see_nothing_are_zero(name, is_causal):
    kernel = KERNELS[name]() if name in KERNELS else linattn.kernels.Softmax()
    query, key, value = qkv(30, grad=True)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0] = False
    mask[1, :4] = False
    out, state = linattn.attention(
        query, key, value, kernel=kernel, key_mask=mask, is_causal=is_causal, return_state=True
    )
    assert out[0].abs().sum() == 0
    assert out[1, :, 4:].isfinite().all()
    assert (out[1, :, :4].abs().sum() == 0) == is_causal
    for grad in torch.autograd.grad(out.sum(), (query, key, value)):
        assert grad.isfinite().all()
        assert grad[0].abs().sum() == 0
    if name in KERNELS and name != "relu":
        assert state.guarded.sum() == 0
        assert state.tokens.tolist() == [[0, 0], [26, 26]]


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_the_implied_attention_sum_to_one(kernel: Kernel, is_causal):
    query, key, _ = qkv(60)
    identity = torch.eye(60, dtype=torch.float64).expand(2, 2, 60, 60)
    fed = linattn.attention(query, key, identity, kernel=kernel, is_causal=is_causal)
    shown = linattn.implied_attention(query, key, kernel, is_causal=is_causal)
    assert_close(fed, shown)
    sums = fed.sum(-1)
    assert_close(sums[sums != 0], torch.ones_like(sums[sums != 0]))
    assert (sums != 0).double().mean() > 0.9


def test_padding_the_queries_is_the_callers_business_but_stays_finite(kernel: Kernel):
    query, key, value = qkv(30)
    query[:, :, :5] = 0
    assert linattn.attention(query, key, value, kernel=kernel, is_causal=True).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_have_float32_sums(kernel: Kernel, dtype):
    query, key, value = qkv(300, dtype=dtype)
    out, state = linattn.attention(query, key, value, kernel=kernel, is_causal=True, return_state=True)
    assert out.dtype == dtype
    assert state.S.dtype == state.Z.dtype == torch.float32
    # The same numbers in float32 throughout: only the last rounding may differ.
    wide = linattn.attention(query.float(), key.float(), value.float(), kernel=kernel, is_causal=True)
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("norm", [1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_norms_give_no_nan_and_no_infinity(kernel: Kernel, norm, dtype, is_causal):
    query, key, value = qkv(200, dtype=torch.float64)
    query, key = (x / x.norm(dim=-1, keepdim=True) * norm for x in (query, key))
    query, key, value = (x.to(dtype).requires_grad_() for x in (query, key, value))
    out = linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal)
    assert out.isfinite().all()
    if norm <= 30 or type(kernel).__name__ not in ("Polynomial", "Custom"):
        for grad in torch.autograd.grad(out.float().square().sum(), (query, key, value)):
            assert grad.isfinite().all()


def test_autocast_does_not_reach_the_sums():
    query, key, value = qkv(100, dtype=torch.float32)
    expected = linattn.attention(query, key, value, kernel="positive", is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linattn.attention(query, key, value, kernel="positive", is_causal=True)
    assert torch.equal(out, expected)


def test_the_guard_is_counted():
    """A query that shares no positive coordinate with any key cannot be divided; it gets 0 and is counted."""
    query, key, value = -torch.ones(1, 2, 5, DIM), torch.ones(1, 2, 5, DIM), torch.ones(1, 2, 5, 3)
    for is_causal in (False, True):
        out, state = linattn.attention(query, key, value, kernel="relu", is_causal=is_causal, return_state=True)
        assert out.abs().sum() == 0
        assert state.guarded.tolist() == [[5, 5]]
        out, state = linattn.attention(
            -query, key, value, kernel="relu", is_causal=is_causal, state=state, return_state=True
        )
        assert_close(out, torch.ones_like(out))
        assert state.guarded.tolist() == [[5, 5]]


def test_thread_count_does_not_change_results(kernel: Kernel):
    query, key, value = qkv(300, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linattn.attention(query, key, value, kernel=kernel, is_causal=True)
        torch.set_num_threads(2)
        assert_close(linattn.attention(query, key, value, kernel=kernel, is_causal=True), one)
    finally:
        torch.set_num_threads(threads)


PACKS = {"one": [0, 40], "three": [0, 7, 30, 40], "empty ones": [0, 0, 15, 15, 40]}


@pytest.mark.parametrize("bounds", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("name", ["positive", "elu", "polynomial-2", "softmax"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_do_not_see_each_other(name, bounds, is_causal):
    kernel = KERNELS[name]() if name in KERNELS else linattn.kernels.Softmax()
    query, key, value = qkv(40, grad=True)
    options = {"kernel": kernel, "is_causal": is_causal, "return_state": True}
    out, state = linattn.attention(query, key, value, cu_seqlens=torch.tensor(bounds), **options)
    alone = [
        linattn.attention(*(x[:, :, a:b] for x in (query, key, value)), **options)
        for a, b in itertools.pairwise(bounds)
    ]
    expected = torch.cat([rows for rows, _ in alone], 2)
    assert_close(out, expected)
    for got, want in zip(
        *(torch.autograd.grad(x.square().sum(), (query, key, value)) for x in (out, expected)), strict=False
    ):
        assert_close(got, want)
    if name in KERNELS:
        assert state.S.shape[:2] == (2, len(bounds) - 1)
        for i, (_, single) in enumerate(alone):
            assert_close(
                state.S[:, i] * state.log_scale[:, i].exp()[..., None, None],
                single.S * single.log_scale.exp()[..., None, None],
            )
    more = [x[:, :, : len(bounds) - 1] for x in qkv(40)]
    steps = list(range(len(bounds)))
    again = linattn.attention(*more, cu_seqlens=steps, kernel=kernel, is_causal=is_causal, state=state)
    for i, (_, single) in enumerate(alone):
        one = linattn.attention(*(x[:, :, i : i + 1] for x in more), kernel=kernel, is_causal=is_causal, state=single)
        assert_close(again[:, :, i : i + 1], one)


def test_packed_cross_attention_and_gates():
    query, key, value = qkv(12, s=40)
    pair = (torch.tensor([0, 2, 12]), torch.tensor([0, 30, 40]))
    out = linattn.attention(query, key, value, kernel="elu", cu_seqlens=pair)
    first = linattn.attention(query[:, :, :2], key[:, :, :30], value[:, :, :30], kernel="elu")
    assert_close(out[:, :, :2], first)
    query, key, value = qkv(40)
    decay = torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(5), dtype=torch.float64).log()
    out, state = linattn.attention(
        query, key, value, kernel="elu", is_causal=True, log_decay=decay, cu_seqlens=[0, 25, 40], return_state=True
    )
    parts = [x[:, :, 25:] for x in (query, key, value)]
    alone, single = linattn.attention(
        *parts, kernel="elu", is_causal=True, log_decay=decay[..., 25:], return_state=True
    )
    assert_close(out[:, :, 25:], alone)
    assert_close(
        state.S[:, 1] * state.log_scale[:, 1].exp()[..., None, None], single.S * single.log_scale.exp()[..., None, None]
    )


def test_queries_and_keys_see_one_draw():
    kernel = linattn.kernels.Positive(DIM, 16)
    x = tokens(5, DIM, dtype=torch.float32)
    assert torch.equal(kernel.query_features(x), kernel.key_features(x))
    trig = linattn.kernels.Trig(DIM, 16)
    assert torch.equal(trig.query_features(x), trig.key_features(x))


def test_implied_attention_shows_the_exact_similarity_too():
    query, key, _ = qkv(20)
    kernel = linattn.kernels.Positive(DIM, 24)
    shown = linattn.implied_attention(query, key, kernel, exact_similarity=True)
    assert_close(shown, (query @ key.mT / DIM**0.5).softmax(-1))
    assert_close(linattn.implied_attention(query, key, "softmax"), (query @ key.mT / DIM**0.5).softmax(-1))
    assert_close(oracle.weights(query, key, kernel), linattn.implied_attention(query, key, kernel))
