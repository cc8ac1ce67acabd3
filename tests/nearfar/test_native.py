"""Near/far attention of the native engine: every instruction set, odd sizes, masks, groups and budgets, streams and forks."""

import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn
from linattn import NearFar, attention
from linattn.engines.native.ffi import ISA_LEVELS, library
from native_support import close, isa, needs_native
from nearfar_support import CAUSAL, SMALL, tensors
from nearfar_support import in_pieces as pieces_of

pytestmark = needs_native
__all__ = ["isa"]

NATIVE = {"engine": "native", **CAUSAL}


def truth(q, k, v, kernel, **options):
    """The torch engine in float64."""
    return attention(q.double(), k.double(), v.double(), kernel=kernel, engine="torch", enable_gqa=True, **options)


def in_pieces(*given, engine="native", **options):
    return pieces_of(*given, engine=engine, **options)


def same_state(a, b, tolerance=1e-5):
    for name, x in a.tensors().items():
        torch.testing.assert_close(b.tensors()[name], x, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("dim", [1, 7, 16, 33, 80])
@pytest.mark.parametrize("value_dim", [1, 17, 64])
@pytest.mark.parametrize("slots", [5, 40])
def test_ragged_sizes(isa, dim, value_dim, slots):
    q, k, v = tensors(150, dim=dim, value_dim=value_dim, batch=1)
    kernel = NearFar(window=21, slots=slots, sinks=2, block=12)
    with torch.no_grad():
        got, state = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
    expected, wide = truth(q, k, v, kernel, is_causal=True, return_state=True)
    # On a line, costs of pairs come so close that float32 may choose another pair.
    close(got, expected, 1e-5 if dim > 1 else 2e-2)
    assert state.slots.shape == wide.slots.shape
    assert state.tokens.tolist() == wide.tokens.tolist()
    assert state.merged.tolist() == wide.merged.tolist()


@pytest.mark.parametrize("window", [0, 16, 23])
@pytest.mark.parametrize("block", [1, 7, 16])
@pytest.mark.parametrize("sinks", [0, 5, 20])
@pytest.mark.parametrize("slots", [0, 13])
def test_odd_windows_blocks_and_sinks(isa, window, block, sinks, slots):
    q, k, v = tensors(110, batch=1)
    kernel = NearFar(window=window, slots=slots, sinks=sinks, block=block)
    expected = truth(q, k, v, kernel, is_causal=True)
    close(attention(q, k, v, kernel=kernel, **NATIVE), expected)
    close(in_pieces(q, k, v, [1, 50, 1, 1, 57], kernel)[0], expected)


@pytest.mark.parametrize("slots", [20, [8, 32], [0, 24]])
def test_one_call_is_any_split_is_token_by_token(isa, slots):
    q, k, v = tensors()
    kernel = NearFar(**{**SMALL, "slots": slots})
    whole, state = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
    close(whole, truth(q, k, v, kernel, is_causal=True))
    for lengths in ([1] * 200, [100, 100], [130, 1, 1, 16, 15, 17, 20], [3, 197]):
        pieces, last = in_pieces(q, k, v, lengths, kernel)
        close(pieces, whole)
        same_state(state, last)


def test_masks_with_nan_behind_them(isa):
    q, k, v = tensors(220, batch=3)
    kernel = NearFar(**SMALL)
    mask = torch.rand(3, 220, generator=torch.Generator().manual_seed(3)) > 0.2
    mask[0, :40], mask[1, 100:180], mask[2] = False, False, False
    hidden = ~mask[:, None, :, None]
    poisoned = [x.masked_fill(hidden, torch.nan) for x in (q, k, v)]
    expected = truth(q, k, v, kernel, is_causal=True, key_mask=mask)
    for lengths in ([220], [150, 70], [150] + [1] * 70):
        out, state = in_pieces(*poisoned, lengths, kernel, mask)
        close(out, expected)
        assert not out[hidden.expand_as(out)].any()
        assert state.tokens.tolist() == mask.sum(-1).tolist()


def test_what_lies_around_the_tokens_is_never_read(isa):
    """Tokens inside larger tensors full of NaN, and results on memory that was NaN before."""
    q, k, v = tensors(150)
    kernel = NearFar(**SMALL)
    expected = attention(q, k, v, kernel=kernel, **NATIVE)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        views = []
        for x in (q, k, v):
            room = torch.full((*x.shape[:2], x.shape[2] + 9, x.shape[3] + 5), torch.nan)
            room[:, :, 4:-5, 2:-3] = x
            views.append(room[:, :, 4:-5, 2:-3])
        out, state = attention(*views, kernel=kernel, return_state=True, **NATIVE)
        assert torch.equal(out, expected)
        stepped, last = in_pieces(*views, [70] + [1] * 80, kernel)
        close(stepped, expected)
        same_state(state, last)
        assert all(torch.isfinite(x).all() for name, x in last.tensors().items() if name != "bias")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_causal", [True, False])
def test_work_space_is_not_read_before_it_is_written(isa, is_causal):
    """A call full of NaN leaves it in the work space of the thread; the next one must not find it."""
    q, k, v = tensors(150)
    options = {**NATIVE, "kernel": NearFar(**SMALL), "is_causal": is_causal}
    expected = attention(q, k, v, **options)
    with pytest.raises(ValueError, match="must be finite"):
        attention(*(torch.full_like(x, torch.nan) for x in (q, k, v)), **options)
    assert torch.equal(attention(q, k, v, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(isa, dtype):
    q, k, v = (x.to(dtype) for x in tensors(150))
    kernel = NearFar(**SMALL)
    expected = truth(q, k, v, kernel, is_causal=True)
    whole, state = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
    steps, _ = in_pieces(q, k, v, [100] + [1] * 50, kernel)
    assert whole.dtype == steps.dtype == dtype
    assert state.near.dtype == torch.float32
    close(whole, expected.to(dtype), 1e-2)
    close(steps, whole, 1e-2)


def test_later_tokens_change_nothing(isa):
    q, k, v = tensors()
    kernel = NearFar(**SMALL)
    before = attention(q, k, v, kernel=kernel, **NATIVE)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 150:] = 100 * torch.randn_like(x[:, :, 150:])
    assert torch.equal(attention(*changed, kernel=kernel, **NATIVE)[:, :, :150], before[:, :, :150])


def test_any_strides_and_threads(isa):
    packed = torch.randn(2, 150, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    kernel = NearFar(**SMALL)
    expected = attention(*(x.contiguous() for x in (q, k, v)), kernel=kernel, **NATIVE)
    assert torch.equal(attention(q, k, v, kernel=kernel, **NATIVE), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(attention(q, k, v, kernel=kernel, **NATIVE), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("engines", [("torch", "native"), ("native", "torch")])
def test_a_state_goes_from_one_engine_to_the_other(engines):
    q, k, v = tensors()
    kernel = NearFar(**{**SMALL, "slots": [12, 30]})
    expected = truth(q, k, v, kernel, is_causal=True)
    first, state = in_pieces(*(x[:, :, :90] for x in (q, k, v)), [90], kernel, engine=engines[0])
    rest, _ = in_pieces(*(x[:, :, 90:] for x in (q, k, v)), [40] + [1] * 70, kernel, engine=engines[1], state=state)
    close(torch.cat([first, rest], 2), expected)


@pytest.mark.parametrize("at", [150, 160, 161])
def test_a_state_may_be_continued_more_than_once(at):
    """Steps write behind tokens that other states hold: none of them may see it."""
    q, k, v = tensors(220)
    kernel = NearFar(**SMALL)
    _, state = in_pieces(*(x[:, :, :at] for x in (q, k, v)), [100] + [1] * (at - 100), kernel)
    kept = {name: x.clone() for name, x in state.tensors().items()}
    other = tensors(220, seed=5)
    ways = [[x[:, :, at:] for x in tokens] for tokens in ((q, k, v), other)]
    alone = [in_pieces(*way, [1] * 30, kernel, state=state.clone())[0] for way in ways]
    states, outs = [state, state], [[], []]
    for t in range(30):  # in turns, so that both want the same place
        for i in (0, 1):
            one = (x[:, :, t : t + 1] for x in ways[i])
            out, states[i] = attention(*one, kernel=kernel, state=states[i], return_state=True, **NATIVE)
            outs[i].append(out)
    for i in (0, 1):
        assert torch.equal(torch.cat(outs[i], 2), alone[i])
    assert all(torch.equal(x, kept[name]) for name, x in state.tensors().items())
    dropped = states[0].drop_last(3)
    again, _ = in_pieces(*(x[:, :, 27:30] for x in ways[0]), [1] * 3, kernel, state=dropped)
    close(again, alone[0][:, :, 27:])


def test_threads_that_continue_the_same_state():
    q, k, v = tensors(200, batch=1)
    kernel = NearFar(**SMALL)
    _, state = in_pieces(*(x[:, :, :170] for x in (q, k, v)), [170], kernel)
    rest = [x[:, :, 170:] for x in (q, k, v)]
    expected = in_pieces(*rest, [1] * 30, kernel, state=state.clone())[0]
    found: list = [None] * 6

    def work(i):
        found[i] = in_pieces(*rest, [1] * 30, kernel, state=state)[0]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(x, expected) for x in found)


@pytest.mark.parametrize(
    ("which", "bad"), [*((x, torch.nan) for x in ("query", "key", "value")), ("query", torch.inf), ("value", torch.inf)]
)
def test_not_finite(isa, which, bad):
    q, k, v = tensors(200)
    kernel = NearFar(**SMALL)
    _, state = in_pieces(*(x[:, :, :165] for x in (q, k, v)), [165], kernel)
    for cut in (slice(0, 20), slice(0, 200), slice(165, 166), slice(165, 200)):
        given = {"query": q[:, :, cut].clone(), "key": k[:, :, cut].clone(), "value": v[:, :, cut].clone()}
        given[which][1, 1, -1, 3] = bad
        options = {"state": state, "return_state": True} if cut.start else {}
        with pytest.raises(ValueError, match=f"{which} must be finite"):
            attention(*given.values(), kernel=kernel, **options, **NATIVE)


def test_non_causal_forms(isa):
    q, k, v = tensors(300)
    kernel = NearFar(**SMALL)
    for keys in (300, 90):
        given = q, k[:, :, :keys], v[:, :, :keys]
        out, state = attention(*given, kernel=kernel, engine="native", enable_gqa=True, return_state=True)
        expected, wide = truth(*given, kernel, return_state=True)
        close(out, expected)
        more = [x[:, :, :40] for x in tensors(300, seed=8)]
        again = attention(*more, kernel=kernel, state=state, engine="native", enable_gqa=True)
        close(again, truth(*more, kernel, state=wide))


@pytest.mark.parametrize(("L", "S"), [(30, 200), (200, 30), (120, 200), (200, 120), (0, 10), (10, 0)])
def test_unequal_lengths(L, S):
    q, k, v = tensors(200)
    q, k, v = q[:, :, 200 - L :], k[:, :, 200 - S :], v[:, :, 200 - S :]
    kernel = NearFar(**SMALL)
    close(attention(q, k, v, kernel=kernel, **NATIVE), truth(q, k, v, kernel, is_causal=True))


def test_empty_sizes():
    for shape in ((0, 2, 5), (2, 2, 0)):
        x = torch.randn(*shape, 4)
        for is_causal in (False, True):
            out, state = attention(x, x, x, kernel="nearfar", engine="native", is_causal=is_causal, return_state=True)
            assert out.shape == x.shape
            assert state.tokens.tolist() == [shape[2]] * shape[0]
    x = torch.randn(2, 0, 5, 4)
    with pytest.raises(ValueError, match="at least one head"):
        attention(x, x, x, kernel="nearfar", engine="native")


@given(
    window=st.integers(0, 40),
    slots=st.integers(0, 40),
    sinks=st.integers(0, 6),
    block=st.integers(1, 20),
    groups=st.integers(1, 3),
    dim=st.integers(2, 20),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    masked=st.booleans(),
    bits=st.sampled_from([32, 16]),
    isa=st.sampled_from(ISA_LEVELS),
)
@settings(max_examples=80, deadline=None)
def test_any_split_of_anything(window, slots, sinks, block, groups, dim, lengths, masked, bits, isa):
    N, before = sum(lengths), library.isa
    q, k, v = tensors(N, heads=2 * groups, kv_heads=2, dim=dim, value_dim=dim + 1, seed=N)
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(N)) > 0.3 if masked else None
    kernel = NearFar(window=window, slots=slots, sinks=sinks, block=block, state_bits=bits)
    tolerance = {32: 1e-5, 16: 2e-3}[bits]  # the last bit of a slot may differ
    with suppress(ValueError):  # a CPU that has less is tested with the best it has
        library.set_isa(isa)
    try:
        whole, state = attention(q, k, v, kernel=kernel, key_mask=mask, return_state=True, **NATIVE)
        pieces, last = in_pieces(q, k, v, lengths, kernel, mask)
        if mask is not None:  # a hidden token's row is 0 or what the others show it, as the calls may be
            pieces, whole = (x.masked_fill(~mask[:, None, :, None], 0) for x in (pieces, whole))
        close(pieces, whole, tolerance)
        if mask is None:  # rows at different positions may hold differently many empty slots
            same_state(state, last, tolerance)
        if mask is None and window >= N:  # everything is near
            close(whole, attention(q.double(), k.double(), v.double(), kernel="softmax", **CAUSAL), tolerance)
    finally:
        library.set_isa(before)


def test_as_faithful_to_softmax_as_the_torch_engine():
    """Where costs are close the plans may differ: what they lose may not."""
    q, k, v = tensors(3000, heads=4, kv_heads=4, dim=16, value_dim=16, batch=1)
    exact = attention(q, k, v, kernel="softmax", is_causal=True)
    lost = [attention(q, k, v, kernel=NearFar(64, 64), engine=e, is_causal=True) - exact for e in ("torch", "native")]
    theirs, ours = (float(x.norm() / exact.norm()) for x in lost)
    assert theirs > 0.01
    assert abs(ours / theirs - 1) < 0.02


def test_refusals_say_why():
    q, k, v = tensors(20)
    with pytest.raises(ValueError, match="trained through torch's own operators"):
        attention(q.clone().requires_grad_(), k, v, kernel=NearFar(recall=1), **NATIVE)
    with torch.no_grad():
        attention(q.clone().requires_grad_(), k, v, kernel=NearFar(recall=1), **NATIVE)
    with pytest.raises(ValueError, match="float64"):
        attention(q.double(), k.double(), v.double(), kernel="nearfar", **NATIVE)


def test_training_from_a_state_reaches_what_came_before():
    q, k, v = (x.requires_grad_() for x in tensors(90))
    kernel = NearFar(**SMALL)
    _, state = attention(*(x[:, :, :60] for x in (q, k, v)), kernel=kernel, return_state=True, **CAUSAL)
    with torch.no_grad():
        new = [x[:, :, 60:61].clone() for x in (q, k, v)]
    out, _ = linattn.attention(*new, kernel=kernel, state=state, return_state=True, **CAUSAL)
    out.sum().backward()
    assert v.grad[:, :, :60].abs().sum() > 0
