"""The attention that keys received: as a loop over positions counts it, kept through splits, and used where slots merge."""

import pytest
import torch

from linattn import NearFar, attention
from linattn.engines.native.ffi import library
from linattn.nearfar.constants import DECAY
from nearfar_support import CAUSAL, tensors

ENGINES = ["torch", pytest.param("native", marks=pytest.mark.skipif(library.why_not is not None, reason="not built"))]


def counted(q, k, kernel, position):
    """(H, position, 2) attention and queries that reached each key, from sampled queries of the blocks before `position`."""
    heads, groups, dim = k.shape[1], q.shape[1] // k.shape[1], q.shape[-1]
    found = torch.zeros(heads, position, 2, dtype=torch.float64)
    for start in range(0, position, kernel.block):
        found *= DECAY
        for t in range(start, start + kernel.block, kernel.stride):
            for h in range(q.shape[1]):
                weights = (k[0, h // groups, : t + 1] @ q[0, h, t] / dim**0.5).softmax(0)
                found[h // groups, : t + 1, 0] += weights
                found[h // groups, : t + 1, 1] += 1
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("window", "block", "sinks"), [(20, 8, 3), (7, 6, 0), (0, 4, 2)])
def test_as_a_loop_over_positions_counts_it(engine, window, block, sinks):
    """Nothing is merged here, so that slots are keys in the order of their positions."""
    q, k, v = tensors(61, batch=1)
    kernel = NearFar(window=window, slots=100, sinks=sinks, block=block)
    options = {"kernel": kernel, "engine": engine, "return_state": True, **CAUSAL}
    _, state = attention(q, k, v, **options)
    _, early = attention(*(x[:, :, :30] for x in (q, k, v)), **options)
    _, later = attention(*(x[:, :, 30:] for x in (q, k, v)), state=early, **options)
    entered = int(state.entered)
    expected = counted(q.double(), k.double(), kernel, entered).float()
    slots = state.slots.shape[1] // k.shape[1]
    live = state.bias.reshape(k.shape[1], slots) > -torch.inf
    for found in (state, later):
        got = found.received.reshape(k.shape[1], slots, 2)
        for h in range(k.shape[1]):
            torch.testing.assert_close(got[h][live[h]], expected[h, sinks : entered - window], atol=1e-5, rtol=1e-5)
        first = max(sinks, entered - window)
        near = found.near_received[0, :, first - (entered - window) :]
        torch.testing.assert_close(near, expected[:, first:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_key_that_is_asked_for_is_kept(engine):
    """One key is asked for again and again, its twin in the other head is not: only the first is still there."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 600, 16, generator=g) for _ in range(3))
    k[0, 1] = k[0, 0]
    v[0, 1] = v[0, 0]
    q[0, 0, 44::8] += 3 * k[0, 0, 40]
    kernel = NearFar(window=32, slots=24, sinks=2, block=16)
    _, state = attention(q, k, v, kernel=kernel, engine=engine, return_state=True, is_causal=True)
    values = state.slots[0, :, 16:].reshape(2, 24, 16)
    asked, other = (values - v[0, 0, 40]).norm(dim=-1).amin(-1).tolist()
    assert asked < 0.1 * other


def test_dropped_tokens_leave_nothing_behind():
    q, k, v = tensors(50, batch=1)
    kernel = NearFar(window=24, slots=30, sinks=2, block=8)
    _, state = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)
    assert int(state.entered) == 48
    shorter = state.drop_last(12)
    assert int(shorter.tokens) == 38
    gone = 48 - 38
    assert (shorter.near_received[:, :, -gone:] == 0).all()
    assert torch.equal(shorter.near_received[:, :, :-gone], state.near_received[:, :, :-gone])
