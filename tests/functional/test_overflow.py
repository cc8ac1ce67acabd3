"""Finite inputs give finite rows, or an error."""

import pytest
import torch

import linattn
from conftest import qkv


@pytest.mark.parametrize("engine", ["torch", "native"])
@pytest.mark.parametrize("name", ["elu", "positive", "polynomial"])
def test_finite_numbers_never_give_infinity_without_a_word(name, engine):
    """Values near the largest float32, in the tokens and in a state: finite rows, or an error."""
    refused = 0
    for tokens in (1, 5, 70):
        q, k, v = qkv(tokens, dtype=torch.float32)
        for is_causal in (False, True):
            _, state = linattn.attention(q, k, v, kernel=name, is_causal=is_causal, return_state=True, engine=engine)
            state.S[0, 0, 0, 0] = 1e38
            options = {"kernel": name, "is_causal": is_causal, "engine": engine}
            for value, before in ((v, state), (1e36 * v, None), (1e38 * v.clamp(-3, 3), None)):
                try:
                    assert bool(linattn.attention(q, k, value, state=before, **options).isfinite().all())
                except ValueError as error:
                    refused += "left the range of torch.float32" in str(error)
    assert refused
