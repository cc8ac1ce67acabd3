"""Recall of more far tokens than the native engine keeps unpacked, or scores at a time."""

import ctypes
import threading

import pytest
import torch

from linattn import NearFar, attention
from linattn.engines.native.ffi import library
from native_support import close, isa, needs_native
from nearfar_support import CAUSAL

pytestmark = needs_native
__all__ = ["isa"]

LONG = 70_000  # 8750 blocks: more than two pieces, and more than stay unpacked


def after(tokens, kernel, dim=8):
    """The state after random keys, and queries, keys and values that go on."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads, count):
        return torch.randn(1, heads, count, dim, generator=generator)

    _, state = attention(draw(2, 1), draw(1, tokens), draw(1, tokens), kernel=kernel, return_state=True, **CAUSAL)
    return state, [draw(heads, 100) for heads in (2, 1, 1)]


@pytest.mark.parametrize(("slots", "recall", "bits"), [(0, 40, 8), (8, 300, 16), (8, 5000, 32)])
def test_the_torch_engine_recalls_the_same(isa, slots, recall, bits):
    kernel = NearFar(16, slots, recall=recall, recall_bits=bits)
    state, tokens = after(LONG, kernel)
    if recall == 5000:  # more than a piece has, and slow
        tokens = [x[:, :, :10] for x in tokens]
    options = {"kernel": kernel, "state": state, "return_state": True, **CAUSAL}
    expected, _ = attention(*tokens, engine="torch", **options)
    out, _ = attention(*tokens, engine="native", **options)
    close(out, expected, 2e-5)
    rows = []
    for i in range(10):
        one, options["state"] = attention(*(x[:, :, i : i + 1] for x in tokens), engine="native", **options)
        rows.append(one)
    close(torch.cat(rows, 2), expected[:, :, :10], 2e-5)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_work_space_does_not_grow_with_the_far_tokens(one_thread):
    held = library._library.linattn_scratch_floats
    held.restype = ctypes.c_int64
    kernel, sizes = NearFar(16, 0, recall=40, recall_bits=8), {}

    def measure(count):
        torch.set_num_threads(1)
        state, tokens = states[count]
        _, state = attention(*tokens, kernel=kernel, state=state, return_state=True, engine="native", **CAUSAL)
        attention(*(x[:, :, :1] for x in tokens), kernel=kernel, state=state, return_state=True, **CAUSAL)
        sizes[count] = 4 * held()

    states = {count: after(count, kernel) for count in (LONG, 3 * LONG)}
    for count in states:  # each thread has its own work space, and the call runs in it
        thread = threading.Thread(target=measure, args=(count,))
        thread.start()
        thread.join()
    assert min(sizes.values()) > 0
    assert abs(sizes[3 * LONG] - sizes[LONG]) < 2 * LONG / 10  # bytes: a few bits for each block of 8 tokens
