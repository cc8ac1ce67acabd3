"""Near/far attention: exact where it says so, the same however a sequence is cut, and never looking ahead."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import linattn
from linattn import NearFar, attention
from nearfar_support import CAUSAL, SMALL, error, exact, in_pieces, tensors

pytestmark = pytest.mark.usefixtures("each_engine")


def test_softmax_is_near_far_and_exact_is_torchs_own():
    assert isinstance(linattn.kernels.resolve("nearfar", 8, torch.device("cpu")), NearFar)
    assert isinstance(linattn.kernels.resolve("softmax", 8, torch.device("cpu")), linattn.kernels.Softmax)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("N", [1, 5, 47])
def test_exact_when_the_keys_fit(N, causal):
    q, k, v = tensors(N)
    out = attention(q, k, v, kernel=NearFar(**SMALL), is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, sdpa(q, k, v, is_causal=causal, enable_gqa=True), atol=1e-5, rtol=0)


def test_exact_through_slots_while_none_had_to_be_merged():
    q, k, v = tensors(300)
    kernel = NearFar(window=24, slots=300, sinks=3, block=16)
    out, _ = in_pieces(q, k, v, [250, 50], kernel)
    assert kernel.window + kernel.sinks < 300
    torch.testing.assert_close(out, exact(q, k, v, is_causal=True), atol=1e-5, rtol=0)


def test_close_to_softmax_on_keys_that_cluster_and_better_than_the_window_alone():
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(16, 8, generator=g)
    pick = torch.randint(16, (600,), generator=g)
    k = (centres[pick] + 0.1 * torch.randn(600, 8, generator=g)).expand(1, 1, -1, -1)
    v = (torch.randn(16, 8, generator=g)[pick] + 0.1 * torch.randn(600, 8, generator=g)).expand(1, 1, -1, -1)
    q = torch.randn(1, 1, 600, 8, generator=g) * 2
    truth = exact(q, k, v, is_causal=True)
    near_far = error(attention(q, k, v, kernel=NearFar(32, 32), is_causal=True), truth)
    window = error(attention(q, k, v, kernel=NearFar(64, 0), is_causal=True), truth)
    assert near_far < 0.01 < 0.1 < window


@pytest.mark.parametrize("lengths", [[1] * 200, [100, 100], [130, 1, 1, 16, 15, 17, 20], [199, 1], [3, 197]])
@pytest.mark.parametrize("slots", [20, [8, 32], [0, 24], 0])
def test_any_split_gives_the_same_numbers_and_the_same_state(lengths, slots):
    q, k, v = tensors()
    kernel = NearFar(**{**SMALL, "slots": slots})
    whole, state = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)
    pieces, last = in_pieces(q, k, v, lengths, kernel)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)
    for name, x in state.tensors().items():
        torch.testing.assert_close(last.tensors()[name], x, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("window", [0, 16, 23])
@pytest.mark.parametrize("block", [1, 7, 16])
@pytest.mark.parametrize("sinks", [0, 5, 20])
def test_odd_sizes(window, block, sinks):
    q, k, v = tensors(150, batch=1)
    kernel = NearFar(window=window, slots=13, sinks=sinks, block=block)
    whole = attention(q, k, v, kernel=kernel, **CAUSAL)
    pieces, _ = in_pieces(q, k, v, [1, 70, 1, 1, 77], kernel)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)
    assert whole.isfinite().all()


def test_no_output_depends_on_a_later_token():
    q, k, v = tensors()
    kernel = NearFar(**SMALL)
    before = attention(q, k, v, kernel=kernel, **CAUSAL)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 150:] = 100 * torch.randn_like(x[:, :, 150:])
    after = attention(*changed, kernel=kernel, **CAUSAL)
    assert torch.equal(after[:, :, :150], before[:, :, :150])
    assert not torch.equal(after[:, :, 150:], before[:, :, 150:])


@pytest.mark.parametrize("causal", [True, False])
def test_padding_on_either_side_changes_nothing(causal):
    q, k, v = tensors(160, batch=1)
    kernel = NearFar(**SMALL)
    options = {"kernel": kernel, "is_causal": causal, "enable_gqa": True}
    alone = attention(q, k, v, **options)
    for left, right in ((13, 0), (0, 29)):
        wide = [torch.nn.functional.pad(x, (0, 0, left, right), value=float("nan")) for x in (k, v)]
        wide_q = torch.nn.functional.pad(q, (0, 0, left, right), value=3.0)
        mask = torch.zeros(1, 160 + left + right, dtype=torch.bool)
        mask[:, left : left + 160] = True
        out = attention(wide_q, *wide, key_mask=mask, **options)
        if causal:
            torch.testing.assert_close(out[:, :, left : left + 160], alone, atol=1e-5, rtol=0)
            assert (out[:, :, :left] == 0).all()
        else:  # the queries of the padding are queries like others: the mean query moves a little
            truth = exact(q, k, v)
            assert error(out[:, :, left : left + 160], truth) < 1.1 * error(alone, truth)


def test_rows_of_a_batch_go_on_from_their_own_positions():
    q, k, v = tensors(220, batch=3)
    kernel = NearFar(**SMALL)
    mask = torch.ones(3, 220, dtype=torch.bool)
    mask[0, :9] = False
    mask[1, :50] = False
    mask[2, 96:120] = False  # from the first token of a block on
    alone = []
    for row in range(3):
        keep = mask[row].nonzero().squeeze(-1)
        alone.append(attention(*(x[row : row + 1, :, keep] for x in (q, k, v)), kernel=kernel, **CAUSAL))
    for lengths in ([220], [150, 70], [150] + [1] * 70, [96, 24, 100]):
        out, state = in_pieces(q, k, v, lengths, kernel, mask)
        assert state.tokens.tolist() == mask.sum(-1).tolist()
        for row in range(3):
            torch.testing.assert_close(out[row : row + 1, :, mask[row]], alone[row], atol=1e-5, rtol=0)


def test_masked_short_sequences_match_exact_softmax_in_every_row():
    q, k, v = tensors(40)
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) > 0.3
    out = attention(q, k, v, kernel=NearFar(**SMALL), key_mask=mask, **CAUSAL)
    torch.testing.assert_close(out, exact(q, k, v, mask, is_causal=True), atol=1e-5, rtol=0)


def test_packed_sequences_are_separate_sequences():
    q, k, v = tensors(300, batch=1)
    bounds = [0, 180, 190, 300]
    kernel = NearFar(**SMALL)
    packed = attention(q, k, v, kernel=kernel, cu_seqlens=bounds, **CAUSAL)
    for a, b in itertools.pairwise(bounds):
        alone = attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel=kernel, **CAUSAL)
        torch.testing.assert_close(packed[:, :, a:b], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_budgets_per_head_are_heads_on_their_own(causal):
    q, k, v = tensors(200, heads=6, kv_heads=3)
    sizes = [8, 40, 8]
    options = {"is_causal": causal, "enable_gqa": True}
    out = attention(q, k, v, kernel=NearFar(**{**SMALL, "slots": torch.tensor(sizes)}), **options)
    for h, m in enumerate(sizes):
        heads = slice(2 * h, 2 * h + 2)
        alone = attention(
            q[:, heads], k[:, h : h + 1], v[:, h : h + 1], kernel=NearFar(**{**SMALL, "slots": m}), **options
        )
        torch.testing.assert_close(out[:, heads], alone, atol=1e-5, rtol=0)


def test_without_slots_both_sides_see_a_window_alone():
    q, k, v = tensors(160, batch=1)
    kernel = NearFar(window=10, slots=0, sinks=0, block=8)
    matrix = linattn.implied_attention(q, k, kernel)
    block = torch.arange(160) // 8 * 8
    key = torch.arange(160)
    seen = (key >= block[:, None] - 10) & (key < block[:, None] + 18)
    logits = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    torch.testing.assert_close(matrix, logits.masked_fill(~seen, -torch.inf).softmax(-1), atol=1e-5, rtol=0)
    mask = torch.ones(1, 160, dtype=torch.bool)
    mask[:, 100:] = False
    out = attention(q, k, v, kernel=kernel, key_mask=mask, enable_gqa=True)
    alone = attention(q[:, :, :100], k[:, :, :100], v[:, :, :100], kernel=kernel, enable_gqa=True)
    torch.testing.assert_close(out[:, :, :100], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("causal", "recall"), [(True, 0), (True, 2), (False, 0)])
def test_the_implied_attention_of_given_values_is_the_one_that_is_used(causal, recall):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, 150, dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((4, 16), (2, 16), (2, 8))
    )
    kernel = NearFar(**SMALL, recall=recall)
    matrix = linattn.implied_attention(q, k, kernel, value=v, is_causal=causal)
    out = linattn.attention(q, k, v, kernel=kernel, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(matrix @ v.repeat_interleave(2, 1), out, rtol=1e-9, atol=1e-9)


def test_rows_of_the_implied_attention_sum_to_one_and_are_not_negative():
    q, k, _ = tensors(150)
    for causal in (True, False):
        matrix = linattn.implied_attention(q, k, NearFar(**SMALL), is_causal=causal)
        torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 4, 150), atol=1e-5, rtol=0)
        assert (matrix > -1e-6).all()


def test_cross_attention_compresses_the_keys_once_and_reads_them_many_times():
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(2, 2, 16, 8, generator=g)
    pick = torch.randint(16, (500,), generator=g)
    k, v = (x[:, :, pick] + 0.05 * torch.randn(2, 2, 500, 8, generator=g) for x in (centres, centres.flip(2)))
    q = torch.randn(2, 4, 100, 8, generator=g)
    kernel = NearFar(**SMALL)
    options = {"kernel": kernel, "enable_gqa": True}
    truth = exact(q, k, v)
    assert error(attention(q, k, v, **options), truth) < 0.02
    _, state = attention(q, k, v, return_state=True, **options)
    none = (k[:, :, :0], v[:, :, :0])
    again = attention(q, *none, state=state, **options)
    assert error(again, truth) < 0.05
    one = attention(q[:, :, 7:8], *none, state=state, **options)
    torch.testing.assert_close(one, again[:, :, 7:8], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("L", "S"), [(30, 200), (200, 30), (120, 200), (200, 120), (0, 10), (10, 0)])
def test_unequal_lengths_are_aligned_at_the_end(L, S):
    q, k, v = tensors(200)
    q, k, v = q[:, :, 200 - L :], k[:, :, 200 - S :], v[:, :, 200 - S :]
    out = attention(q, k, v, kernel=NearFar(**{**SMALL, "slots": 200}), **CAUSAL)
    torch.testing.assert_close(out, exact(q, k, v, is_causal=True), atol=1e-5, rtol=0)
    few = attention(q, k, v, kernel=NearFar(**SMALL), **CAUSAL)
    assert few.shape == out.shape
    assert few.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_computed_in_float32_or_better(dtype):
    q, k, v = (x.to(dtype) for x in tensors(150))
    out, state = attention(q, k, v, kernel=NearFar(**SMALL), return_state=True, **CAUSAL)
    wide = attention(q.double(), k.double(), v.double(), kernel=NearFar(**SMALL), **CAUSAL)
    assert out.dtype == dtype
    assert state.near.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert error(out.double(), wide) < {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]


def test_huge_norms_stay_finite():
    q, k, v = tensors(200)
    out = attention(30 * q, 30 * k, v, kernel=NearFar(**SMALL), **CAUSAL)
    assert out.isfinite().all()


def test_bad_arguments_say_what_is_wrong():
    q, k, v = tensors(50)
    for options, message in [
        ({"window": -1}, "window"),
        ({"block": 0}, "block"),
        ({"slots": -3}, "slots"),
        ({"alpha": -1.0}, "alpha"),
        ({"slots": torch.rand(3)}, "whole numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            NearFar(**options)
    with pytest.raises(ValueError, match="slots for 3 kv heads"):
        attention(q, k, v, kernel=NearFar(slots=[1, 2, 3]), enable_gqa=True)
    _, state = attention(q, k, v, kernel=NearFar(), return_state=True, **CAUSAL)
    with pytest.raises(ValueError, match="cannot go on with"):
        attention(q, k, v, kernel=NearFar(slots=64), state=state, **CAUSAL)
    with pytest.raises(ValueError, match="query heads per kv head"):
        attention(q[:, :2], k, v, kernel=NearFar(), state=state, **CAUSAL)
    with pytest.raises(ValueError, match="must be finite"):
        attention(q.masked_fill(q > 2, torch.nan), k, v, kernel="nearfar", **CAUSAL)
    with pytest.raises(ValueError, match="near/far"):
        attention(q, k, v, kernel="nearfar", log_decay=-torch.ones(2, 2, 50), **CAUSAL)
