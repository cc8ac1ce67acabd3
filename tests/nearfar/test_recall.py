"""Recall: heads that keep their far tokens find the ones that matter, and everything that holds for near/far still holds."""

import pytest
import torch

import linattn
from linattn import NearFar, attention
from native_support import close, needs_native
from nearfar_support import CAUSAL, SMALL, error, exact, in_pieces, state_saved_forked_and_selected, tensors
from nearfar_twin import Twin, twin

ALL = 1000  # more blocks than any sequence here has


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def engine(request):
    return request.param


def recalling(recall, **changes):
    return NearFar(**{**SMALL, **changes}, recall=recall)


def copying(N=400, dim=64, seed=0):
    """Every key has a direction of its own; a query late in the sequence asks for one key far back."""
    g = torch.Generator().manual_seed(seed)
    k = torch.nn.functional.normalize(torch.randn(1, 1, N, dim, generator=g), dim=-1)
    v = torch.randn(1, 1, N, dim, generator=g)
    wanted = torch.randint(8, N // 3, (N // 2,), generator=g)
    q = torch.cat([k[:, :, : N - N // 2], k[:, :, wanted]], 2)
    return 20 * q, 8 * k, v


@pytest.mark.parametrize("slots", [0, 20, [8, 32]])
@pytest.mark.parametrize(("window", "sinks", "block"), [(24, 3, 16), (0, 0, 16), (20, 0, 12), (23, 20, 7), (16, 5, 1)])
def test_exact_when_everything_is_recalled(engine, slots, window, sinks, block):
    q, k, v = tensors(150)
    kernel = NearFar(window, slots, sinks, block, recall=ALL)
    whole = attention(q, k, v, kernel=kernel, engine=engine, **CAUSAL)
    torch.testing.assert_close(whole, exact(q, k, v, is_causal=True), atol=1e-5, rtol=0)
    pieces, _ = in_pieces(q, k, v, [1, 70, 1, 1, 77], kernel, engine=engine)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("slots", [0, 10])
def test_as_the_definition_token_by_token(engine, slots, cap):
    q, k, v = tensors(100, batch=1)
    kernel = NearFar(12, slots, 3, 8, recall=2, logit_cap=cap)
    expected = twin(q, k, v, kernel)
    close(attention(q, k, v, kernel=kernel, engine=engine, **CAUSAL), expected)
    close(in_pieces(q, k, v, [40] + [1] * 60, kernel, engine=engine)[0], expected)


@pytest.mark.parametrize("lengths", [[100], [40] + [1] * 60])
def test_chosen_blocks_without_weight_stay_in_the_slots(engine, lengths):
    q, k, v = tensors(100, batch=1)
    kernel = NearFar(12, 10, 3, 8, recall=6)
    expected = twin(4 * q, k, v, kernel)
    close(in_pieces(4 * q, k, v, lengths, kernel, engine=engine)[0], expected)

    class AllChosen(Twin):
        least_weight = 0.0

    assert error(twin(4 * q, k, v, kernel, AllChosen), expected) > 1e-4


def test_what_was_copied_from_far_back_is_found(engine):
    q, k, v = copying()
    truth = exact(q, k, v, is_causal=True)[:, :, 200:]
    errors = {
        r: error(attention(q, k, v, kernel=recalling(r), engine=engine, **CAUSAL)[:, :, 200:], truth)
        for r in (0, 1, 2, 4)
    }
    assert errors[4] < 0.02 < 0.5 < errors[0]
    assert errors[4] < errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize("lengths", [[1] * 200, [130, 1, 1, 16, 15, 17, 20]])
@pytest.mark.parametrize(("slots", "recall"), [(20, 2), (20, [0, 3]), ([8, 32], 1), (0, 2), ([0, 24], [2, 1])])
def test_any_split_gives_the_same_numbers_and_the_same_state(engine, lengths, slots, recall):
    q, k, v = tensors()
    kernel = recalling(recall, slots=slots)
    whole, state = attention(q, k, v, kernel=kernel, return_state=True, engine=engine, **CAUSAL)
    assert error(whole, exact(q, k, v, is_causal=True)) > 1e-3
    pieces, last = in_pieces(q, k, v, lengths, kernel, engine=engine)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)
    assert {"far_entries", "far_bounds", "far_slot", "far_log_share"} <= set(state.tensors())
    for name, x in state.tensors().items():
        torch.testing.assert_close(last.tensors()[name], x, atol=1e-5, rtol=1e-5, msg=name)


def test_rows_of_a_batch_go_on_from_their_own_positions(engine):
    q, k, v = tensors(220, batch=3)
    kernel = recalling(2)
    mask = torch.ones(3, 220, dtype=torch.bool)
    mask[0, :37], mask[1, 100:111] = False, False
    alone = [
        attention(*(x[r : r + 1, :, mask[r]] for x in (q, k, v)), kernel=kernel, engine=engine, **CAUSAL)
        for r in range(3)
    ]
    for lengths in ([220], [150, 70], [150] + [1] * 70):
        out, _ = in_pieces(q, k, v, lengths, kernel, mask, engine=engine)
        for row in range(3):
            torch.testing.assert_close(out[row : row + 1, :, mask[row]], alone[row], atol=1e-5, rtol=0)


def test_packed_sequences_are_separate_sequences(engine):
    q, k, v = tensors(300, batch=1)
    packed = attention(q, k, v, kernel=recalling(2), cu_seqlens=[0, 180, 190, 300], engine=engine, **CAUSAL)
    for a, b in ((0, 180), (180, 190), (190, 300)):
        alone = attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel=recalling(2), engine=engine, **CAUSAL)
        torch.testing.assert_close(packed[:, :, a:b], alone, atol=1e-5, rtol=0)


def test_no_output_depends_on_a_later_token(engine):
    q, k, v = tensors()
    before = attention(q, k, v, kernel=recalling(2), engine=engine, **CAUSAL)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 150:] = 100 * torch.randn_like(x[:, :, 150:])
    after = attention(*changed, kernel=recalling(2), engine=engine, **CAUSAL)
    torch.testing.assert_close(after[:, :, :150], before[:, :, :150], atol=1e-5, rtol=0)


def test_recall_by_head_is_heads_on_their_own(engine):
    q, k, v = tensors(200, heads=6, kv_heads=3)
    out = attention(q, k, v, kernel=recalling(torch.tensor([0, 3, 1]), slots=[8, 20, 8]), engine=engine, **CAUSAL)
    for h, (m, r) in enumerate([(8, 0), (20, 3), (8, 1)]):
        heads = slice(2 * h, 2 * h + 2)
        alone = attention(
            q[:, heads], k[:, h : h + 1], v[:, h : h + 1], kernel=recalling(r, slots=m), engine=engine, **CAUSAL
        )
        torch.testing.assert_close(out[:, heads], alone, atol=1e-5, rtol=0)


def test_rows_of_the_implied_attention_sum_to_one():
    q, k, _ = tensors(150)
    matrix = linattn.implied_attention(q, k, recalling(2), is_causal=True)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 4, 150), atol=1e-5, rtol=0)


def test_memory_grows_for_the_heads_with_recall_alone(engine):
    def grown(recall, bits):
        kernel = NearFar(**SMALL, recall=recall, recall_bits=bits)
        short, long = (
            attention(*tensors(N, batch=1), kernel=kernel, return_state=True, engine=engine, **CAUSAL)[1]
            for N in (200, 600)
        )
        return (long.nbytes - short.nbytes) / 400

    assert grown((0, 0), 32) == 0
    # key and value of 8 and 6 numbers, bounds of 8 keys, place and share
    for bits, token in ((32, 4 * (14 + 2) + 12), (16, 2 * (14 + 2) + 12), (8, 14 + 2 * (2 + 1) + 12)):
        assert grown((0, 1), bits) == token
        assert grown((1, 1), bits) == 2 * token
        assert NearFar(**SMALL, recall=1, recall_bits=bits).recall_bytes(8, 6) == token


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_the_formula_counts_what_is_kept(bits):
    kernel = NearFar(64, 32, recall=[0, 4], recall_bits=bits)
    state = attention(*tensors(1000, batch=1), kernel=kernel, return_state=True, **CAUSAL)[1]
    counted = linattn.measure.cost(kernel, 1000, 8, 6, is_causal=True)
    assert counted.state_bytes * 2 == pytest.approx(state.nbytes, rel=0.1)
    assert counted.flops > linattn.measure.cost(NearFar(64, 32), 1000, 8, 6, is_causal=True).flops


@pytest.mark.parametrize(("bits", "dtype", "lost"), [(16, torch.float16, 2e-3), (8, torch.int8, 1e-2)])
def test_fewer_bits_cost_little(engine, bits, dtype, lost):
    q, k, v = copying()
    truth = exact(q, k, v, is_causal=True)
    kernel = NearFar(**SMALL, recall=4, recall_bits=bits)
    whole = attention(q, k, v, kernel=kernel, engine=engine, **CAUSAL)
    assert (
        abs(error(whole, truth) - error(attention(q, k, v, kernel=recalling(4), engine=engine, **CAUSAL), truth)) < lost
    )
    pieces, state = in_pieces(q, k, v, [250] + [1] * 150, kernel, engine=engine)
    assert state.far_entries.dtype == dtype
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)


def test_rows_in_8_bits_go_on_from_their_own_positions(engine):
    q, k, v = tensors(220, batch=2)
    kernel = NearFar(**SMALL, recall=2, recall_bits=8)
    mask = torch.ones(2, 220, dtype=torch.bool)
    mask[0, :37] = False
    alone = [
        attention(*(x[r : r + 1, :, mask[r]] for x in (q, k, v)), kernel=kernel, engine=engine, **CAUSAL)
        for r in range(2)
    ]
    out, state = in_pieces(q, k, v, [150, 1, 30, 39], kernel, mask, engine=engine)
    for row in range(2):
        torch.testing.assert_close(out[row : row + 1, :, mask[row]], alone[row], atol=1e-5, rtol=0)
    _, whole = attention(q, k, v, kernel=kernel, key_mask=mask, return_state=True, engine=engine, **CAUSAL)
    assert torch.equal(state.far_entries, whole.far_entries)


def test_8_bits_carry_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors(200))
    with pytest.raises(ValueError, match="recall_bits=32"):
        attention(q, k, v, kernel=NearFar(**SMALL, recall=2, recall_bits=8), **CAUSAL)


@pytest.mark.parametrize("bits", [32, 8])
def test_state_saved_forked_and_selected(engine, bits, tmp_path):
    kernel = recalling([0, 2], slots=[8, 40], recall_bits=bits)
    state, rest = state_saved_forked_and_selected(kernel, tmp_path, engine)
    with pytest.raises(ValueError, match="cannot go on with"):
        attention(*rest, kernel=recalling(3, slots=[8, 40]), state=state, engine=engine, **CAUSAL)


@pytest.mark.parametrize("dropped", [5, 15])
def test_dropped_tokens_are_gone(engine, dropped):
    """Inside a block as if they had never been; across one, nothing of them is seen."""
    q, k, v = tensors(200)
    kernel, end = recalling(3), 199  # 199 = 12 * 16 + 7
    poisoned = v.clone()
    poisoned[:, :, end - dropped :] = 1e6
    tail = [x[:, :, end - dropped : end + 1] for x in (q, k, v)]
    _, straight = in_pieces(q, k, v, [end - dropped], kernel, engine=engine)
    _, longer = in_pieces(q, k, poisoned, [end], kernel, engine=engine)
    a = attention(*tail, kernel=kernel, state=longer.drop_last(dropped), engine=engine, **CAUSAL)
    if dropped < 8:
        b = attention(*tail, kernel=kernel, state=straight, engine=engine, **CAUSAL)
    else:
        _, other = in_pieces(q, k, v, [end], kernel, engine=engine)
        b = attention(*tail, kernel=kernel, state=other.drop_last(dropped), engine=engine, **CAUSAL)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_state_is_read_with_recall_by_queries_that_have_no_place(engine):
    q, k, v = tensors(300)
    none = (k[:, :, :0], v[:, :, :0])
    for recall, bound in ((ALL, 1e-5), (0, 1e9)):
        _, state = attention(q, k, v, kernel=recalling(recall), return_state=True, engine=engine, **CAUSAL)
        out = attention(q, *none, kernel=recalling(recall), state=state, engine=engine, enable_gqa=True)
        assert error(out, exact(q, k, v)) < bound
    assert error(out, exact(q, k, v)) > 0.05
    _, state = attention(q, k, v, kernel=recalling(2), return_state=True, engine=engine, **CAUSAL)
    many = attention(q, *none, kernel=recalling(2), state=state, engine=engine, enable_gqa=True)
    one = attention(q[:, :, 77:78], *none, kernel=recalling(2), state=state, engine=engine, enable_gqa=True)
    torch.testing.assert_close(one, many[:, :, 77:78], atol=1e-5, rtol=0)


def test_gradients_are_those_of_softmax_when_everything_is_recalled():
    inputs = [x.requires_grad_() for x in tensors(120, dtype=torch.float64)]
    weight = torch.randn(2, 4, 120, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = [
        torch.autograd.grad((attention(*inputs, kernel=kernel, **CAUSAL) * weight).sum(), inputs)
        for kernel in (recalling(ALL), "softmax")
    ]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-8, rtol=1e-6)


def test_gradients_agree_with_finite_differences():
    # As without recall, the choices carry no gradient, nor do the mean query and the metric: move keys and values only.
    q, k, v = tensors(120, heads=1, kv_heads=1, dim=3, batch=1, value_dim=2, dtype=torch.float64)
    kernel = NearFar(window=8, slots=8, sinks=2, block=8, recall=3)
    g = torch.Generator().manual_seed(9)
    weight, *way = (torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (v, k, v))
    inputs = [k.requires_grad_(), v.requires_grad_()]

    def f(t):
        return (
            attention(q, *(x + t * d for x, d in zip(inputs, way, strict=True)), kernel=kernel, is_causal=True) * weight
        ).sum()

    slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(f(0.0), inputs), way, strict=True))
    torch.testing.assert_close(slope, (f(1e-7) - f(-1e-7)) / 2e-7, rtol=1e-5, atol=1e-6)


def test_huge_norms_stay_finite(engine):
    q, k, v = tensors(200)
    assert attention(30 * q, 30 * k, v, kernel=recalling(2), engine=engine, **CAUSAL).isfinite().all()


def test_no_head_that_recalls_is_no_recall():
    assert NearFar(recall=[0, 0]).recall == 0
    assert NearFar(recall=[0, 0]).signature() == NearFar().signature()


def test_bad_arguments_say_what_is_wrong(engine):
    q, k, v = tensors(100)
    with pytest.raises(ValueError, match="recall must be at least 0"):
        NearFar(recall=-1)
    with pytest.raises(ValueError, match="32, 16 or 8, got 4"):
        NearFar(recall=2, recall_bits=4)
    with pytest.raises(ValueError, match="recall for 3 kv heads"):
        attention(q, k, v, kernel=NearFar(recall=[1, 2, 3]), engine=engine, **CAUSAL)
    with pytest.raises(ValueError, match="recall serves causal attention"):
        attention(q, k, v, kernel=recalling(2), engine=engine, enable_gqa=True)
    short = [x[:, :, :30] for x in (q, k, v)]  # fits, so that there is nothing to recall
    out = attention(*short, kernel=recalling(2), engine=engine, enable_gqa=True)
    torch.testing.assert_close(out, exact(*short), atol=1e-5, rtol=0)
