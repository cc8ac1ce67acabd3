"""Recall of the native engine beside the torch engine: outputs, states, engines that take turns, and buffers that grow."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn import NearFar, State, attention
from linattn.engines.native.ffi import ISA_LEVELS, library
from linattn.states.base import pack_of
from native_support import close, isa, needs_native
from nearfar_support import CAUSAL, SMALL, in_pieces, tensors

pytestmark = needs_native
__all__ = ["isa"]

NATIVE = {"engine": "native", **CAUSAL}
SPLIT = [1, 1, 16, 15, 17, 20]


def truth(q, k, v, kernel, **options):
    """The torch engine in float64. Stored in 8 bits, keys are those of float32."""
    wide = torch.float32 if kernel.recall_bits == 8 else torch.float64
    return attention(q.to(wide), k.to(wide), v.to(wide), kernel=kernel, engine="torch", **CAUSAL, **options)


def same_state(a, b, tolerance=1e-5):
    for name, x in a.tensors().items():
        torch.testing.assert_close(b.tensors()[name], x, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize(("window", "sinks", "block"), [(24, 3, 16), (0, 0, 16), (20, 0, 12), (23, 20, 7), (16, 5, 1)])
@pytest.mark.parametrize(("slots", "recall"), [(20, 2), ([8, 32], [0, 3]), (0, 2), ([0, 24], [2, 1])])
def test_one_call_is_any_split_is_the_torch_engine(bits, window, sinks, block, slots, recall):
    N = 200 if block > 1 else 120  # many small merges take the torch engine long
    q, k, v = tensors(N)
    kernel = NearFar(window, slots, sinks, block, recall=recall, recall_bits=bits)
    whole, state = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
    close(whole, truth(q, k, v, kernel), 2e-5)
    for lengths in ([1] * N, [N - sum(SPLIT), *SPLIT]):
        pieces, last = in_pieces(q, k, v, lengths, kernel, engine="native")
        close(pieces, whole)
        same_state(state, last)


@pytest.mark.parametrize(("dim", "value_dim", "groups"), [(1, 1, 1), (7, 17, 2), (16, 64, 3), (33, 5, 4), (80, 33, 5)])
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_ragged_sizes(isa, dim, value_dim, groups, bits):
    q, k, v = tensors(150, dim=dim, value_dim=value_dim, batch=1, heads=2 * groups)
    kernel = NearFar(21, 15, 2, 12, recall=[3, 0], recall_bits=bits)
    expected = truth(q, k, v, kernel)
    # On a line, costs of pairs come so close that float32 may choose another pair.
    tolerance = 2e-5 if dim > 1 else 5e-2
    close(attention(q, k, v, kernel=kernel, **NATIVE), expected, tolerance)
    close(in_pieces(q, k, v, [70] + [1] * 80, kernel, engine="native")[0], expected, tolerance)


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("engines", [("torch", "native"), ("native", "torch")])
def test_a_state_goes_from_one_engine_to_the_other_and_back(engines, bits):
    q, k, v = tensors()
    kernel = NearFar(**{**SMALL, "slots": [12, 30]}, recall=[2, 3], recall_bits=bits)
    outs, state, at = [], None, 0
    for i, n in enumerate([90, 7, 1, 40, 1, 1, 33, 20, 7]):
        cut = [x[:, :, at : at + n] for x in (q, k, v)]
        out, state = attention(*cut, kernel=kernel, state=state, return_state=True, engine=engines[i % 2], **CAUSAL)
        outs.append(out)
        at += n
    close(torch.cat(outs, 2), truth(q, k, v, kernel), 2e-5)


@pytest.mark.parametrize("bits", [32, 8])
def test_both_engines_keep_the_same_far_tokens(bits):
    q, k, v = tensors()
    kernel = NearFar(**SMALL, recall=2, recall_bits=bits)
    a, b = (attention(q, k, v, kernel=kernel, return_state=True, engine=e, **CAUSAL)[1] for e in ("native", "torch"))
    alive = a.far_log_share > -torch.inf
    assert torch.equal(alive, b.far_log_share > -torch.inf)
    torch.testing.assert_close(a.far_log_share, b.far_log_share, atol=1e-4, rtol=0)
    torch.testing.assert_close(a.far_bounds[..., :16], b.far_bounds[..., :16], atol=1e-3, rtol=1e-3)
    one = 1 if bits == 8 else 1e-6
    torch.testing.assert_close(a.far_entries[alive].float(), b.far_entries[alive].float(), atol=one, rtol=0)


@pytest.mark.parametrize("bits", [32, 8])
def test_masks_with_nan_behind_them(isa, bits):
    q, k, v = tensors(220, batch=3)
    kernel = NearFar(**SMALL, recall=[2, 0], recall_bits=bits)
    mask = torch.rand(3, 220, generator=torch.Generator().manual_seed(3)) > 0.2
    mask[0, :40], mask[1, 100:180], mask[2] = False, False, False
    hidden = ~mask[:, None, :, None]
    poisoned = [x.masked_fill(hidden, torch.nan) for x in (q, k, v)]
    expected = truth(q, k, v, kernel, key_mask=mask)
    for lengths in ([220], [150] + [1] * 70):
        out, _ = in_pieces(*poisoned, lengths, kernel, mask, engine="native")
        close(out, expected, 2e-5)


def test_memory_is_written_before_it_is_read(isa):
    q, k, v = tensors(150)
    kernel = NearFar(**SMALL, recall=2, recall_bits=16)
    expected, state = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
    with pytest.raises(ValueError, match="must be finite"):  # leaves NaN in the work space of the thread
        attention(*(torch.full_like(x, torch.nan) for x in (q, k, v)), kernel=kernel, **NATIVE)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out, again = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
        stepped, last = in_pieces(q, k, v, [70] + [1] * 80, kernel, engine="native")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(out, expected)
    close(stepped, expected)
    same_state(state, again)
    same_state(state, last)


@pytest.mark.parametrize("option", ["logit_cap", "alibi_slopes", "position_bias"])
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_caps_and_position_biases(isa, option, bits):
    q, k, v = tensors()
    g = torch.Generator().manual_seed(4)
    options = {
        "logit_cap": 2.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01]),
        "position_bias": torch.randn(4, 2 * 20 + 1, generator=g),
    }
    kernel = NearFar(**SMALL, recall=2, recall_bits=bits, **{option: options[option]})
    expected = truth(q, k, v, kernel)
    close(attention(q, k, v, kernel=kernel, **NATIVE), expected, 5e-5)
    close(in_pieces(q, k, v, [90] + [1] * 110, kernel, engine="native")[0], expected, 5e-5)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("at", [150, 160, 161])
def test_a_state_may_be_continued_more_than_once(at, read):
    """Calls write behind far tokens that other states hold: none of them may see it."""
    q, k, v = tensors(260)
    kernel = NearFar(**SMALL, recall=2)
    _, state = in_pieces(*(x[:, :, :at] for x in (q, k, v)), [100] + [1] * (at - 100), kernel, engine="native")
    kept = state.clone()
    assert not read or state.far_entries is not None
    ways = [[x[:, :, at:] for x in tokens] for tokens in ((q, k, v), tensors(260, seed=5))]
    alone = [in_pieces(*way, [1] * 80, kernel, state=kept.clone(), engine="native")[0] for way in ways]
    states, outs = [state, state], [[], []]
    for t in range(80):
        for i in (0, 1):
            one = (x[:, :, t : t + 1] for x in ways[i])
            out, states[i] = attention(*one, kernel=kernel, state=states[i], return_state=True, **NATIVE)
            outs[i].append(out)
    for i in (0, 1):
        assert torch.equal(torch.cat(outs[i], 2), alone[i])
    assert state == kept


def test_rows_of_different_lengths_leave_older_states_alone():
    q, k, v = tensors(300)
    kernel = NearFar(**SMALL, recall=2, recall_bits=8)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[0, :90] = False
    first = [x[:, :, :200] for x in (q, k, v)]
    _, state = attention(*first, kernel=kernel, key_mask=mask, return_state=True, **NATIVE)
    kept, states = state.clone(), [state]
    for t in range(200, 300):
        one = (x[:, :, t : t + 1] for x in (q, k, v))
        out, after = attention(*one, kernel=kernel, state=states[-1], return_state=True, **NATIVE)
        states.append(after)
    assert state == kept
    alone = attention(*(x[:1, :, 90:] for x in (q, k, v)), kernel=kernel, **NATIVE)
    close(out[:1], alone[:, :, -1:])
    middle = states[50].clone()
    again, _ = in_pieces(*(x[:, :, 250:] for x in (q, k, v)), [1] * 50, kernel, state=middle, engine="native")
    close(again[:, :, -1:], out)


def test_far_tokens_are_not_copied_at_every_merge():
    q, k, v = tensors(1200, batch=1)
    kernel = NearFar(**SMALL, recall=1)
    _, state = attention(*(x[:, :, :200] for x in (q, k, v)), kernel=kernel, return_state=True, **NATIVE)
    buffers = set()
    for t in range(200, 1200):
        one = (x[:, :, t : t + 1] for x in (q, k, v))
        _, state = attention(*one, kernel=kernel, state=state, return_state=True, **NATIVE)
        buffers.add(id(pack_of(state).far.buffer.entries))
    assert len(buffers) < 12  # of 62 merges
    assert state.far_entries.untyped_storage().nbytes() <= 1.4 * state.far_entries.nbytes


def test_heads_without_recall_keep_no_far_tokens():
    q, k, v = tensors(200, heads=6, kv_heads=3)
    kernel = NearFar(**{**SMALL, "slots": [8, 20, 8]}, recall=[0, 3, 0])
    _, state = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
    assert state.far_entries.shape[1] == 1


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_states_from_files_are_checked_and_go_on(tmp_path, bits):
    q, k, v = tensors(200)
    kernel = NearFar(**SMALL, recall=2, recall_bits=bits)
    _, state = attention(*(x[:, :, :150] for x in (q, k, v)), kernel=kernel, return_state=True, **NATIVE)
    rest = [x[:, :, 150:] for x in (q, k, v)]
    expected = attention(*rest, kernel=kernel, state=state, **NATIVE)
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors")
    assert loaded == state
    close(attention(*rest, kernel=kernel, state=loaded, **NATIVE), expected)
    beyond = loaded.far_slot.clone()
    beyond[-1, -1, -1] = 20
    damaged = [
        ({"far_slot": beyond}, "name slots"),
        ({"far_bounds": loaded.far_bounds[..., :-1]}, "wide"),
        ({"far_entries": loaded.far_entries[:, :1]}, "far_bounds must be"),
        ({"far_log_share": torch.full_like(loaded.far_log_share, torch.nan)}, "far_log_share must lie between"),
        ({"far_entries": loaded.far_entries.to(torch.float32 if bits == 8 else torch.int8)}, "stores"),
        ({"far_slot": None}, "together"),
    ]
    for change, message in damaged:
        for tokens in (rest, [x[:, :, :1] for x in rest]):
            with pytest.raises(ValueError, match=message):
                attention(*tokens, kernel=kernel, state=replace(loaded, **change), return_state=True, **NATIVE)


@given(
    window=st.integers(0, 40),
    slots=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    sinks=st.integers(0, 6),
    block=st.integers(1, 20),
    recall=st.tuples(st.integers(0, 4), st.integers(1, 9)),
    bits=st.sampled_from([32, 16, 8]),
    state_bits=st.sampled_from([32, 16]),
    groups=st.integers(1, 4),
    dim=st.integers(2, 20),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    masked=st.booleans(),
    isa=st.sampled_from(ISA_LEVELS),
)
@settings(max_examples=40, deadline=None)
def test_any_split_of_anything(
    window, slots, sinks, block, recall, bits, state_bits, groups, dim, lengths, masked, isa
):
    N, before = sum(lengths), library.isa
    q, k, v = tensors(N, heads=2 * groups, kv_heads=2, dim=dim, value_dim=dim + 1, seed=N)
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(N)) > 0.3 if masked else None
    kernel = NearFar(window, slots, sinks, block, recall=recall, recall_bits=bits, state_bits=state_bits)
    least = {32: 2e-5, 16: 2e-3}[state_bits]  # the last bit of a slot may differ
    with suppress(ValueError):  # a CPU that has less is tested with the best it has
        library.set_isa(isa)
    try:
        whole, state = attention(q, k, v, kernel=kernel, key_mask=mask, return_state=True, **NATIVE)
        pieces, last = in_pieces(q, k, v, lengths, kernel, mask, engine="native")
        if mask is not None:  # a hidden token's row is 0 or what the others show it, as the calls may be
            pieces, whole = (x.masked_fill(~mask[:, None, :, None], 0) for x in (pieces, whole))
        # A call in which nothing has to be merged yet is exact, whatever the bits of the far tokens.
        close(pieces, whole, max(least, {32: 2e-5, 16: 2e-3, 8: 5e-2}[bits]))
        if mask is None:  # rows at different positions may hold differently many empty slots
            same_state(state, last, least)
    finally:
        library.set_isa(before)
