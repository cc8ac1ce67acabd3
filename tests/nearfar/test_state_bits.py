"""Near/far states in 16 bits: half the memory, keys and values rounded once, and everything else as in 32 bits."""

import pytest
import torch

from linattn import NearFar, attention
from nearfar_support import CAUSAL, SMALL, in_pieces, state_saved_forked_and_selected, tensors

HALF = {**SMALL, "state_bits": 16}
pytestmark = pytest.mark.usefixtures("each_engine")


def rounded(q, k, v, scale=None):
    """Tokens whose scaled keys and values have 16 bits."""
    root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    return q, (k * root).half().float() / root, v.half().float()


def test_keys_and_values_are_rounded_as_they_arrive_and_nothing_else_is():
    q, k, v = tensors(SMALL["window"] + SMALL["sinks"] + SMALL["slots"])
    got = attention(q, k, v, kernel=NearFar(**HALF), **CAUSAL)
    exact = attention(*rounded(q, k, v), kernel="softmax", **CAUSAL)
    torch.testing.assert_close(got, exact, atol=2e-6, rtol=2e-6)
    assert (got - attention(q, k, v, kernel="softmax", **CAUSAL)).abs().max() > 2e-5


@pytest.mark.parametrize("options", [{}, {"recall": [0, 2]}, {"logit_cap": 3.0}, {"slots": [0, 24]}])
@pytest.mark.parametrize("lengths", [[1] * 200, [130, 1, 1, 16, 15, 17, 20]])
def test_any_split_gives_the_same_numbers_and_the_same_state(lengths, options):
    q, k, v = tensors(200)
    kernel = NearFar(**{**HALF, **options})
    whole, state = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)
    pieces, last = in_pieces(q, k, v, lengths, kernel)
    torch.testing.assert_close(pieces, whole, atol=1e-3, rtol=1e-3)
    for name, x in state.tensors().items():
        torch.testing.assert_close(last.tensors()[name], x, atol=1e-3, rtol=1e-3, msg=name)


def test_padding_changes_nothing():
    q, k, v = tensors(200)
    mask = torch.rand(2, 200, generator=torch.Generator().manual_seed(0)) > 0.3
    kernel = NearFar(**HALF)
    k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    out = attention(q, k, v, kernel=kernel, key_mask=mask, **CAUSAL)
    for b in range(2):
        alone = attention(*(x[b : b + 1, :, mask[b]] for x in (q, k, v)), kernel=kernel, **CAUSAL)
        torch.testing.assert_close(out[b : b + 1, :, mask[b]], alone, atol=1e-3, rtol=1e-3)


def test_what_is_lost_to_softmax_is_lost_by_pooling():
    """The error of 16 bits cannot be seen beside that of the slots, on keys that cluster."""
    q, k, v = tensors(600, batch=1)
    k = k[:, :, torch.arange(600) % 60] + 0.05 * k
    exact = attention(q, k, v, kernel="softmax", **CAUSAL)
    lost = [(attention(q, k, v, kernel=NearFar(**SMALL, state_bits=b), **CAUSAL) - exact).norm() for b in (32, 16)]
    assert lost[0] > 0.01 * exact.norm()
    assert lost[1] < 1.02 * lost[0]


def test_the_formula_counts_what_is_kept_and_that_is_about_half():
    q, k, v = tensors(400, batch=1, dim=32, value_dim=32)
    held = {}
    for bits in (32, 16):
        kernel = NearFar(32, 64, state_bits=bits)
        held[bits] = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)[1].nbytes
        counts = 3 * 8  # tokens, merged, entered
        assert held[bits] == k.shape[1] * kernel.state_bytes(64, 32, 32, q.shape[1] // k.shape[1]) + counts
    assert held[16] < 0.7 * held[32]


def test_state_saved_forked_and_selected(tmp_path):
    state_saved_forked_and_selected(NearFar(**{**HALF, "slots": [8, 40]}), tmp_path)


def test_a_state_may_be_moved_to_another_type_and_back():
    q, k, v = tensors(200)
    kernel = NearFar(**HALF)
    _, state = attention(*(x[:, :, :150] for x in (q, k, v)), kernel=kernel, return_state=True, **CAUSAL)
    assert state.slots.dtype == state.near.dtype == state.sink.dtype == torch.float16
    assert state.bias.dtype == torch.float32
    rest = [x[:, :, 150:] for x in (q, k, v)]
    expected = attention(*rest, kernel=kernel, state=state, **CAUSAL)
    wide, last = attention(*rest, kernel=kernel, state=state.to(torch.float64), return_state=True, **CAUSAL)
    torch.testing.assert_close(wide, expected, atol=1e-5, rtol=1e-5)
    assert last.slots.dtype == torch.float16


def test_a_state_goes_from_one_engine_to_the_other():
    q, k, v = tensors(200, seed=3)
    kernel = NearFar(**HALF)
    first, rest = ([x[:, :, cut] for x in (q, k, v)] for cut in (slice(150), slice(150, None)))
    whole = attention(q, k, v, kernel=kernel, engine="torch", **CAUSAL)
    _, state = attention(*first, kernel=kernel, return_state=True, **CAUSAL)
    last = attention(*rest, kernel=kernel, state=state, engine="torch", **CAUSAL)
    torch.testing.assert_close(last, whole[:, :, 150:], atol=1e-3, rtol=1e-3)


def test_gradients_pass_straight_through_the_rounding():
    q, k, v = (x.requires_grad_() for x in tensors(90, batch=1))
    ways = torch.randn(1, 4, 90, v.shape[-1], generator=torch.Generator().manual_seed(0))
    found = {}
    for bits in (16, 32):
        out = attention(q, k, v, kernel=NearFar(**SMALL, state_bits=bits), **CAUSAL)
        found[bits] = torch.autograd.grad((out * ways).sum(), (q, k, v))
    for half, full in zip(found[16], found[32], strict=True):
        assert float((half - full).norm() / full.norm()) < 0.01


def test_bad_arguments_say_what_is_wrong():
    q, k, v = tensors(100)
    kernel = NearFar(**HALF)
    for tokens in ((q, k * 1e6, v), (q, k, v * 1e5)):
        with pytest.raises(ValueError, match="up to 65504"):
            attention(*tokens, kernel=kernel, **CAUSAL)
    with pytest.raises(ValueError, match="state_bits must be 32 or 16, got 8"):
        NearFar(state_bits=8)
    with pytest.raises(ValueError, match="neither alibi_slopes nor position_bias"):
        NearFar(state_bits=16, alibi_slopes=[0.5, 0.25])
    _, state = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)
    with pytest.raises(ValueError, match="state_bits=16"):
        attention(q, k, v, kernel=NearFar(**SMALL), state=state, **CAUSAL)


def test_a_state_of_keys_that_all_queries_see_holds_rounded_tokens():
    """By either engine the same, as if the keys had been rounded before."""
    q, k, v = tensors(200, seed=5)
    kernel = NearFar(**HALF)
    options = {"kernel": kernel, "enable_gqa": True, "return_state": True}
    _, state = attention(q, k, v, **options)
    _, expected = attention(*rounded(q, k, v), engine="torch", **options)
    for name in ("sink", "near", "slots", "bias"):
        torch.testing.assert_close(state.tensors()[name], expected.tensors()[name], atol=2e-3, rtol=2e-3, msg=name)
