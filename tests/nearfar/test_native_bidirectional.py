"""Near/far attention without is_causal by the native engine: odd sizes, masks, groups, and the fast path beside its options."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn import NearFar, attention
from linattn.nearfar import native_bidirectional
from native_support import close, isa, needs_native
from nearfar_support import SMALL, tensors

pytestmark = needs_native
__all__ = ["isa"]

NATIVE = {"engine": "native", "enable_gqa": True}


def truth(q, k, v, kernel, **options):
    """The torch engine in float64."""
    return attention(q.double(), k.double(), v.double(), kernel=kernel, engine="torch", enable_gqa=True, **options)


@pytest.fixture
def calls(monkeypatch):
    """The plans of all calls that the native form serves."""
    seen, attend = [], native_bidirectional.attend

    def counted(plan, *tokens):
        seen.append(plan)
        return attend(plan, *tokens)

    monkeypatch.setattr(native_bidirectional, "attend", counted)
    return seen


class Labelled(torch.Tensor):
    """A subclass, whose memory only torch's own operators may read."""


@pytest.mark.parametrize(("dim", "value_dim"), [(2, 1), (7, 5), (16, 33), (65, 80)])
@pytest.mark.parametrize("slots", [5, 40])
def test_ragged_sizes(isa, calls, dim, value_dim, slots):
    q, k, v = tensors(150, dim=dim, value_dim=value_dim, batch=1)
    kernel = NearFar(window=21, slots=slots, sinks=2, block=12)
    close(attention(q, k, v, kernel=kernel, **NATIVE), truth(q, k, v, kernel))
    assert len(calls) == 1


@pytest.mark.parametrize("window", [0, 16, 23])
@pytest.mark.parametrize("block", [1, 7, 16, 200])
@pytest.mark.parametrize("slots", [0, 13, [0, 30]])
def test_odd_windows_and_blocks(isa, window, block, slots):
    q, k, v = tensors(110, batch=1)
    kernel = NearFar(window=window, slots=slots, sinks=2, block=block)
    close(attention(q, k, v, kernel=kernel, **NATIVE), truth(q, k, v, kernel))


@pytest.mark.parametrize("keys", [5300, 4096, 1500])
def test_long_sequences_are_merged_in_segments(isa, keys):
    q, k, v = tensors(5300, heads=2, kv_heads=1, batch=1)
    kernel = NearFar(window=40, slots=24, block=32)
    given = q, k[:, :, :keys], v[:, :, :keys]
    close(attention(*given, kernel=kernel, **NATIVE), truth(*given, kernel), 2e-5)


def test_more_slots_than_a_segment_has_keys(isa):
    q, k, v = tensors(1500, heads=1, kv_heads=1, batch=1)
    kernel = NearFar(window=10, slots=300, block=32, logit_cap=3.0)
    close(attention(q, k, v, kernel=kernel, **NATIVE), truth(q, k, v, kernel))


@pytest.mark.parametrize("keys", [220, 150])
def test_masks_with_nan_behind_them(isa, calls, keys):
    q, k, v = tensors(220, batch=3)
    k, v = k[:, :, :keys], v[:, :, :keys]
    kernel = NearFar(**SMALL)
    mask = torch.rand(3, keys, generator=torch.Generator().manual_seed(3)) > 0.2
    mask[0, :40], mask[1, 60:130], mask[2] = False, False, False
    hidden = ~mask[:, None, :, None]
    poisoned = q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
    out = attention(*poisoned, kernel=kernel, key_mask=mask, **NATIVE)
    close(out, truth(q, k, v, kernel, key_mask=mask))
    assert not out[2].any()
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(isa, calls, dtype):
    q, k, v = (x.to(dtype) for x in tensors(150))
    kernel = NearFar(**SMALL)
    out = attention(q, k, v, kernel=kernel, **NATIVE)
    assert out.dtype == dtype
    close(out, truth(q, k, v, kernel).to(dtype), 1e-2)
    assert len(calls) == 1


def test_any_strides_and_threads(isa):
    q, k, v = tensors(300)
    kernel = NearFar(**SMALL)
    expected = attention(q, k, v, kernel=kernel, **NATIVE)
    views = []
    for x in (q, k, v):
        room = torch.full((*x.shape[:2], x.shape[2] + 9, x.shape[3] + 5), torch.nan)
        room[:, :, 4:-5, 2:-3] = x
        views.append(room[:, :, 4:-5, 2:-3])
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    columns = [x.mT.contiguous().mT for x in (q, k, v)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for given in (views, apart, columns):
                assert torch.equal(attention(*given, kernel=kernel, **NATIVE), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite(isa, which, bad):
    given = dict(zip(("query", "key", "value"), tensors(150), strict=True))
    given[which] = given[which].clone()
    given[which][0, 1, 70, 2] = bad
    with pytest.raises(ValueError, match=f"{which} must be finite"):
        attention(*given.values(), kernel=NearFar(**SMALL), **NATIVE)


@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(0, 30),
    slots=st.integers(0, 40),
    block=st.integers(1, 20),
    groups=st.integers(1, 3),
    dim=st.integers(2, 20),
    lengths=st.tuples(st.integers(1, 160), st.integers(1, 160)),
    same=st.booleans(),
    masked=st.booleans(),
)
def test_any_shape(window, slots, block, groups, dim, lengths, same, masked):
    L, S = lengths if not same else (lengths[0], lengths[0])
    q, k, v = tensors(max(L, S), heads=2 * groups, dim=dim)
    given = q[:, :, :L], k[:, :, :S], v[:, :, :S]
    mask = torch.rand(2, S, generator=torch.Generator().manual_seed(L)) > 0.3 if masked else None
    kernel = NearFar(window=window, slots=slots, sinks=2, block=block)
    expected = truth(*given, kernel, key_mask=mask)
    close(attention(*given, kernel=kernel, key_mask=mask, **NATIVE), expected, 2e-5)


def test_gradients_go_through_torch(calls):
    q, k, v = tensors(150)
    kernel, results = NearFar(**SMALL), []
    for engine in ("auto", "torch"):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*given, kernel=kernel, engine=engine, enable_gqa=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not calls
    with pytest.raises(ValueError, match="without is_causal is trained"):
        attention(q, k, v.clone().requires_grad_(), kernel=kernel, **NATIVE)
    with torch.no_grad():  # nothing is trained here
        close(attention(q, k, torch.nn.Parameter(v), kernel=kernel, **NATIVE), truth(q, k, v, kernel))
    assert len(calls) == 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_plans_made_in_inference_mode_serve_calls_outside(is_causal):
    q, k, v = tensors(150)
    kernel, options = NearFar(**SMALL), {"is_causal": is_causal, **NATIVE}
    with torch.inference_mode():
        first = attention(q, k, v, kernel=kernel, **options)
        assert first.is_inference()
    again = attention(q, k, v, kernel=kernel, **options)
    assert not again.is_inference()
    assert torch.equal(first, again)
    out, state = attention(q, k, v, kernel=kernel, return_state=True, **options)
    assert torch.equal(out, again)
    assert not any(x.is_inference() for x in state.tensors().values())


def test_states_of_calls_from_nothing_are_their_own():
    """All of them begin with one empty state, which the plan keeps."""
    q, k, v = tensors(150)
    kernel, options = NearFar(**SMALL, recall=2), {"is_causal": True, "return_state": True, **NATIVE}
    out, state = attention(q, k, v, kernel=kernel, **options)
    kept = state.clone()
    for x in state.tensors().values():
        x.zero_()
    again, other = attention(q, k, v, kernel=kernel, **options)
    assert torch.equal(out, again)
    assert other == kept
    one, _ = attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], kernel=kernel, **options)
    close(one, v[:, :, :1].repeat_interleave(2, 1))


def test_calls_with_a_state_agree_with_the_fast_path(calls):
    q, k, v = tensors(300)
    kernel = NearFar(**SMALL)
    plain = attention(q, k, v, kernel=kernel, **NATIVE)
    out, state = attention(q, k, v, kernel=kernel, return_state=True, **NATIVE)
    assert torch.equal(out, plain)
    assert len(calls) == 2
    _, wide = truth(q, k, v, kernel, return_state=True)
    close(attention(q, k, v, kernel=kernel, state=state, **NATIVE), truth(q, k, v, kernel, state=wide))
    assert len(calls) == 2  # a state is read by torch's operators


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward gradients use it
def test_subclasses_and_transforms_go_to_torch(calls):
    q, k, v = tensors(150)
    kernel = NearFar(**SMALL)
    expected = attention(q, k, v, kernel=kernel, engine="torch", enable_gqa=True)
    special = attention(q, k.as_subclass(Labelled), v, kernel=kernel, enable_gqa=True)
    close(special.as_subclass(torch.Tensor), expected)
    out, way = torch.func.jvp(lambda x: attention(x, k, v, kernel=kernel, enable_gqa=True), (q,), (q,))
    close(out, expected)
    assert way.any()
    assert not calls
    with pytest.raises(ValueError, match="Labelled"):
        attention(q, k.as_subclass(Labelled), v, kernel=kernel, **NATIVE)


def test_what_the_native_form_leaves_to_torch(calls):
    """Position biases, and calls in which some or all keys fit; recall is refused."""
    q, k, v = tensors(150)
    for kernel in (
        NearFar(**SMALL, position_bias=torch.randn(4, 9)),
        NearFar(**{**SMALL, "slots": 200}),
        NearFar(**{**SMALL, "slots": [8, 200]}),
    ):
        close(attention(q, k, v, kernel=kernel, **NATIVE), truth(q, k, v, kernel))
    assert not calls
    with pytest.raises(ValueError, match="recall serves causal attention"):
        attention(q, k, v, kernel=NearFar(**SMALL, recall=2), **NATIVE)


def test_a_kernel_is_changed_copied_and_pickled_after_calls():
    q, k, v = tensors(150)
    kernel = NearFar(**SMALL)
    first = attention(q, k, v, kernel=kernel, **NATIVE)
    causal = attention(q, k, v, kernel=kernel, is_causal=True, **NATIVE)
    for other in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert not other.native_plans
        assert torch.equal(attention(q, k, v, kernel=other, **NATIVE), first)
        assert torch.equal(attention(q, k, v, kernel=other, is_causal=True, **NATIVE), causal)
    kernel.slots = 7
    close(attention(q, k, v, kernel=kernel, **NATIVE), truth(q, k, v, NearFar(**{**SMALL, "slots": 7})))
    scaled = attention(q, k, v, kernel=kernel, scale=0.1, **NATIVE)
    close(scaled, truth(q, k, v, NearFar(**{**SMALL, "slots": 7}), scale=0.1))


def test_arguments_are_checked_as_elsewhere():
    q, k, v = tensors(150)
    kernel = NearFar(**SMALL)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        attention(q, k, v, kernel=kernel)
    with pytest.raises(ValueError, match="every key needs a value"):
        attention(q, k, v[:, :, 1:], kernel=kernel, enable_gqa=True)
    with pytest.raises(TypeError, match="must have one dtype"):
        attention(q, k, v.half(), kernel=kernel, enable_gqa=True)
    with pytest.raises(ValueError, match="same dim"):
        attention(q, k[..., 1:], v, kernel=kernel, enable_gqa=True)
