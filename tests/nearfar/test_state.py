"""The state of near/far attention: bounded, saved, forked, and with its last tokens dropped."""

import pytest
import torch

from linattn import NearFar, attention
from nearfar_support import CAUSAL, SMALL, in_pieces, state_saved_forked_and_selected, tensors

pytestmark = pytest.mark.usefixtures("each_engine")


def test_state_saved_forked_and_selected(tmp_path):
    state_saved_forked_and_selected(NearFar(**{**SMALL, "slots": [8, 40]}), tmp_path)


def test_state_does_not_grow():
    q, k, v = tensors(1, batch=1)
    kernel = NearFar(**SMALL)
    sizes = {}
    for N in (150, 300, 3000):
        q, k, v = tensors(N, batch=1)
        sizes[N] = attention(q, k, v, kernel=kernel, return_state=True, **CAUSAL)[1].nbytes
    assert sizes[150] == sizes[300] == sizes[3000]


@pytest.mark.parametrize("dropped", [1, 5, 7])
def test_dropping_tokens_of_the_current_block_is_as_if_they_had_never_been(dropped):
    q, k, v = tensors(200)
    kernel = NearFar(**SMALL)
    for end in (200 - 200 % 16 - 1, 199):  # 199 = 12 * 16 + 7
        _, straight = in_pieces(q, k, v, [end - dropped], kernel)
        _, longer = in_pieces(q, k, v, [end - dropped, dropped], kernel)
        tail = [x[:, :, end - dropped : end + 1] for x in (q, k, v)]
        a = attention(*tail, kernel=kernel, state=longer.drop_last(dropped), **CAUSAL)
        b = attention(*tail, kernel=kernel, state=straight, **CAUSAL)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_dropping_tokens_across_a_block_hides_them_all_the_same():
    q, k, v = tensors(200)
    kernel = NearFar(**SMALL)
    _, state = in_pieces(q, k, v, [200], kernel)
    poisoned = v.clone()
    poisoned[:, :, 185:] = 1e6
    _, other = in_pieces(q, k, poisoned, [200], kernel)
    tail = [x[:, :, 185:] for x in (q, k, v)]
    a = attention(*tail, kernel=kernel, state=state.drop_last(15), **CAUSAL)
    b = attention(*tail, kernel=kernel, state=other.drop_last(15), **CAUSAL)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="only the last"):
        state.drop_last(60)
