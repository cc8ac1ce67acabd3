"""Near/far states in 16 and 8 bits: less memory, keys and values rounded once, and everything else as in 32 bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linattn import NearFar, State, attention
from linattn.nearfar.entry_codes import decode, encode, round_entries
from nearfar_support import CAUSAL, SMALL, in_pieces, state_saved_forked_and_selected, tensors

pytestmark = pytest.mark.usefixtures("each_engine")
# The last bit of a slot may differ between two ways of adding the same numbers.
CLOSE = {16: {"atol": 1e-3, "rtol": 1e-3}, 8: {"atol": 3e-2, "rtol": 3e-2}}
DTYPES = {16: torch.float16, 8: torch.int8}


@pytest.fixture(params=[16, 8])
def bits(request):
    return request.param


def small(bits, **options):
    return NearFar(**{**SMALL, "state_bits": bits, **options})


def coded(x):
    """In groups of 32 numbers, whole multiples of a 127th of the largest, itself rounded to bfloat16."""
    groups = []
    for group in x.split(32, -1):
        step = (group.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
        groups.append((group / step).round() * step)
    return torch.cat(groups, -1)


def rounded(q, k, v, bits):
    """Tokens whose scaled keys and values have so many bits."""
    root = q.shape[-1] ** -0.25
    change = coded if bits == 8 else lambda x: x.half().float()
    return q, change(k * root) / root, change(v)


def same(state, expected, bits):
    """The same state, up to the last bit of its slots."""
    for name, x in expected.tensors().items():
        got, dim = state.tensors()[name], expected.moments.shape[-1] - 1
        if name in ("sink", "near", "slots"):
            got, x = decode(got, dim, torch.float32), decode(x, dim, torch.float32)
        torch.testing.assert_close(got, x, **CLOSE[bits], msg=name)


def test_keys_and_values_are_rounded_as_they_arrive_and_nothing_else_is(bits):
    q, k, v = tensors(SMALL["window"] + SMALL["sinks"] + SMALL["slots"])
    got = attention(q, k, v, kernel=small(bits), **CAUSAL)
    exact = attention(*rounded(q, k, v, bits), kernel="softmax", **CAUSAL)
    torch.testing.assert_close(got, exact, atol=2e-6, rtol=2e-6)
    assert (got - attention(q, k, v, kernel="softmax", **CAUSAL)).abs().max() > 2e-5


def test_a_state_is_shown_in_one_line_also_if_it_cannot_be_used(bits):
    q, k, v = tensors(150)
    for kernel in (small(bits), small(bits, recall=1, recall_bits=8)):
        _, state = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)
        text = repr(state)
        assert f"dim={q.shape[-1]}, value_dim={v.shape[-1]}, tokens=150" in text
        assert "\n" not in text
        state.slots = state.slots[..., :-1]
        assert repr(state).endswith("cannot be used)")


@given(st.integers(0, 2**31), st.integers(1, 80), st.integers(0, 80), st.sampled_from([1e-38, 1e-6, 1.0, 1e30]))
def test_rounding_twice_changes_nothing_and_codes_hold_what_was_rounded(seed, dim, value_dim, size):
    x = torch.randn(3, dim + value_dim, generator=torch.Generator().manual_seed(seed)) * size
    x[0] = 0
    for kind in (torch.float32, torch.float64):
        once = round_entries(x.to(kind), dim, 8)
        assert torch.equal(round_entries(once, dim, 8), once)
        assert torch.equal(decode(encode(once, dim, 8), dim, kind), once)
        for part, of in ((once[:, :dim], x[:, :dim]), (once[:, dim:], x[:, dim:])):
            if part.shape[1] and size > 1e-30:
                assert ((part - of).abs() <= of.abs().amax(-1, keepdim=True) / 127 * 0.51).all()


@pytest.mark.parametrize("options", [{}, {"recall": [0, 2]}, {"logit_cap": 3.0}, {"slots": [0, 24]}])
@pytest.mark.parametrize("lengths", [[1] * 200, [130, 1, 1, 16, 15, 17, 20]])
def test_any_split_gives_the_same_numbers_and_the_same_state(lengths, options, bits):
    q, k, v = tensors(200)
    kernel = small(bits, **options)
    whole, state = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)
    pieces, last = in_pieces(q, k, v, lengths, kernel)
    torch.testing.assert_close(pieces, whole, **CLOSE[bits])
    same(last, state, bits)


def test_padding_changes_nothing(bits):
    q, k, v = tensors(200)
    mask = torch.rand(2, 200, generator=torch.Generator().manual_seed(0)) > 0.3
    kernel = small(bits)
    k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    out = attention(q, k, v, kernel=kernel, key_mask=mask, **CAUSAL)
    for b in range(2):
        alone = attention(*(x[b : b + 1, :, mask[b]] for x in (q, k, v)), kernel=kernel, **CAUSAL)
        torch.testing.assert_close(out[b : b + 1, :, mask[b]], alone, **CLOSE[bits])


def test_what_is_lost_to_softmax_is_lost_by_pooling():
    """The rounding can hardly be seen beside the error of the slots, on keys that cluster."""
    q, k, v = tensors(600, batch=1)
    k = k[:, :, torch.arange(600) % 60] + 0.05 * k
    exact = attention(q, k, v, kernel="softmax", **CAUSAL)
    lost = [(attention(q, k, v, kernel=small(b), **CAUSAL) - exact).norm() for b in (32, 16, 8)]
    assert lost[0] > 0.01 * exact.norm()
    assert lost[1] < 1.02 * lost[0]
    assert lost[2] < 1.1 * lost[0]


def test_the_formula_counts_what_is_kept():
    q, k, v = tensors(400, batch=1, dim=32, value_dim=32)
    held = {}
    for bits in (32, 16, 8):
        kernel = NearFar(32, 64, state_bits=bits)
        held[bits] = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)[1].nbytes
        counts = 3 * 8  # tokens, merged, entered
        assert held[bits] == k.shape[1] * kernel.state_bytes(64, 32, 32, q.shape[1] // k.shape[1]) + counts
    assert held[16] < 0.7 * held[32]
    assert held[8] < 0.7 * held[16]


def test_state_saved_forked_and_selected(tmp_path, bits):
    state_saved_forked_and_selected(small(bits, slots=[8, 40]), tmp_path)


def test_a_state_may_be_moved_to_another_type_and_back(bits):
    q, k, v = tensors(200)
    kernel = small(bits)
    _, state = attention(*(x[:, :, :150] for x in (q, k, v)), kernel=kernel, return_state=True, **CAUSAL)
    assert state.slots.dtype == state.near.dtype == state.sink.dtype == DTYPES[bits]
    assert state.bias.dtype == torch.float32
    rest = [x[:, :, 150:] for x in (q, k, v)]
    expected = attention(*rest, kernel=kernel, state=state, **CAUSAL)
    wide, last = attention(*rest, kernel=kernel, state=state.to(torch.float64), return_state=True, **CAUSAL)
    torch.testing.assert_close(wide, expected, atol=1e-5, rtol=1e-5)
    assert last.slots.dtype == DTYPES[bits]


def test_a_state_goes_from_one_engine_to_the_other(bits):
    q, k, v = tensors(200, seed=3)
    kernel = small(bits)
    first, rest = ([x[:, :, cut] for x in (q, k, v)] for cut in (slice(150), slice(150, None)))
    whole = attention(q, k, v, kernel=kernel, engine="torch", **CAUSAL)
    _, state = attention(*first, kernel=kernel, return_state=True, **CAUSAL)
    last = attention(*rest, kernel=kernel, state=state, engine="torch", **CAUSAL)
    torch.testing.assert_close(last, whole[:, :, 150:], **CLOSE[bits])


def test_gradients_pass_straight_through_the_rounding(bits):
    q, k, v = (x.requires_grad_() for x in tensors(90, batch=1))
    ways = torch.randn(1, 4, 90, v.shape[-1], generator=torch.Generator().manual_seed(0))
    found = {}
    for b in (bits, 32):
        out = attention(q, k, v, kernel=small(b), **CAUSAL)
        found[b] = torch.autograd.grad((out * ways).sum(), (q, k, v))
    for short, full in zip(found[bits], found[32], strict=True):
        assert float((short - full).norm() / full.norm()) < (0.01 if bits == 16 else 0.05)


def test_a_state_in_8_bits_carries_no_gradient():
    q, k, v = tensors(90, batch=1)
    k.requires_grad_()
    with pytest.raises(ValueError, match=r"carries no gradient: pass NearFar\(state_bits=16\)"):
        attention(q, k, v, kernel=small(8), return_state=True, **CAUSAL)
    with torch.no_grad():
        _, state = attention(q, k, v, kernel=small(8), return_state=True, **CAUSAL)
    attention(q, k, v, kernel=small(8), state=state, **CAUSAL).sum().backward()
    assert k.grad.abs().sum() > 0


def test_bad_arguments_say_what_is_wrong():
    q, k, v = tensors(100)
    kernel = small(16)
    for tokens in ((q, k * 1e6, v), (q, k, v * 1e5)):
        with pytest.raises(ValueError, match="up to 65504"):
            attention(*tokens, kernel=kernel, **CAUSAL)
    assert attention(q, k * 1e6, v * 1e5, kernel=small(8), **CAUSAL).isfinite().all()
    with pytest.raises(ValueError, match="state_bits must be 32, 16 or 8, got 4"):
        NearFar(state_bits=4)
    for bits in (16, 8):
        with pytest.raises(ValueError, match="neither alibi_slopes nor position_bias"):
            NearFar(state_bits=bits, alibi_slopes=[0.5, 0.25])
    _, state = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)
    with pytest.raises(ValueError, match="state_bits=16"):
        attention(q, k, v, kernel=NearFar(**SMALL), state=state, **CAUSAL)


def test_a_state_of_keys_that_all_queries_see_holds_rounded_tokens(bits):
    """By either engine the same, as if the keys had been rounded before."""
    q, k, v = tensors(200, seed=5)
    options = {"kernel": small(bits), "enable_gqa": True, "return_state": True}
    _, state = attention(q, k, v, **options)
    _, expected = attention(*rounded(q, k, v, bits), engine="torch", **options)
    same(state, expected, bits)


@pytest.mark.parametrize("where", ["key", "value"])
def test_a_token_that_is_not_finite_is_an_error(where, bits):
    tokens = dict(zip(("query", "key", "value"), tensors(60), strict=True))
    tokens[where] = tokens[where].clone()
    tokens[where][0, 0, 40, 3] = torch.inf
    with pytest.raises(ValueError, match=f"{where} must be finite"):
        attention(**tokens, kernel=small(bits), **CAUSAL)


def test_damaged_states_in_8_bits_are_refused(tmp_path):
    q, k, v = tensors(200)
    _, state = attention(q, k, v, kernel=small(8), return_state=True, **CAUSAL)
    for name in ("sink", "near", "slots"):
        spoilt = state.clone()
        getattr(spoilt, name)[..., -4:] = torch.tensor([1.0, torch.inf]).bfloat16().view(torch.int8)
        spoilt.save(tmp_path / "spoilt")
        with pytest.raises(ValueError, match=f"its {name} must be finite"):
            State.load(tmp_path / "spoilt")
    wide = state.map(lambda name, x: x.float() if name == "slots" else x)
    with pytest.raises(ValueError, match="must be int8, or none of them"):
        attention(q, k, v, kernel=small(8), state=wide, **CAUSAL)
    dim = state.moments.shape[-1] - 1
    floats = state.map(lambda name, x: decode(x, dim, torch.float32) if name in ("sink", "near", "slots") else x)
    with pytest.raises(ValueError, match="its kernel stores 8 bits"):
        attention(q, k, v, kernel=small(8), state=floats, **CAUSAL)
