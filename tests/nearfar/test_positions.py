"""Positions: the merge frontier and the number of slots follow the number of tokens alone, however they were cut into calls."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn import NearFar, attention
from linattn.nearfar.positions import Positions
from nearfar_support import CAUSAL, SMALL, in_pieces, tensors

KERNELS = st.builds(
    NearFar, window=st.integers(0, 40), slots=st.integers(0, 40), sinks=st.integers(0, 6), block=st.integers(1, 20)
)
COUNTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5)


@given(kernel=KERNELS, calls=COUNTS)
def test_any_split_leads_to_the_same_positions(kernel, calls):
    position, used = Positions.start(2), 0
    for counts in calls:
        used = position.slots_after(kernel, [kernel.slots], [used], list(counts))[0]
        position = position.after(kernel, list(counts))
    total = [sum(counts) for counts in zip(*calls, strict=True)]
    assert position == Positions.start(2).after(kernel, total)
    for tokens, merged, entered in zip(*position, strict=True):
        assert tokens - merged <= kernel.window + kernel.block
        assert merged == 0 or tokens - merged > kernel.window
        assert merged == max(0, entered - kernel.window)
        assert entered % kernel.block == 0
    if position.all_exact(kernel, kernel.slots, [0, 0]):  # then there is room for every key outside the window
        assert max(position.merged) <= kernel.sinks + kernel.slots
    if kernel.slots:
        assert used <= kernel.slots
        assert (used > 0) == (max(position.merged) > kernel.sinks)


@given(kernel=KERNELS, lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_slots_are_as_many_as_the_torch_engine_makes(kernel, lengths):
    q, k, v = tensors(sum(lengths), heads=1, kv_heads=1, dim=2, batch=1, value_dim=2)
    _, state = in_pieces(q, k, v, lengths, kernel, engine="torch")
    position, used = Positions.start(1), 0
    for n in lengths:
        used = position.slots_after(kernel, [kernel.slots], [used], [n])[0]
        position = position.after(kernel, [n])
    assert state.positions == position
    assert state.slots.shape[1] == used


def test_empty_batches_and_calls_leave_positions_as_they_are():
    kernel = NearFar(**SMALL)
    q, k, v = tensors(100)
    for engine in ("torch", "auto"):
        _, state = attention(q, k, v, kernel=kernel, return_state=True, engine=engine, **CAUSAL)
        none = [x[:, :, :0] for x in (q, k, v)]
        out, same = attention(*none, kernel=kernel, state=state, return_state=True, engine=engine, **CAUSAL)
        assert out.shape == (2, 4, 0, 6)
        assert all(torch.equal(x, same.tensors()[name]) for name, x in state.tensors().items())
        few = [x[:0] for x in (q, k, v)]
        out, empty = attention(*few, kernel=kernel, return_state=True, engine=engine, **CAUSAL)
        assert out.shape == (0, 4, 100, 6)
        assert empty.positions == Positions([], [], [])
