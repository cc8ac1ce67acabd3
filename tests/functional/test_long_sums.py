"""LinearState of very many tokens: float32 must neither drift nor stagnate."""

from dataclasses import replace

import pytest
import torch

import linattn
from linattn.states import LinearState

ENGINES = ["torch", "native"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "is_causal"), [("elu", False), ("elu", True), ("positive", True)])
def test_a_million_equal_tokens_average_to_their_value(engine: str, name: str, is_causal: bool) -> None:
    kernel = linattn.kernels.Elu() if name == "elu" else linattn.kernels.Positive(2, 8)
    x = torch.full((1, 1, 10**6, 2), 1.1)
    query = x if is_causal else x[:, :, -1:]
    out = linattn.attention(query, x, x, kernel=kernel, is_causal=is_causal, engine=engine)
    assert float((out / 1.1 - 1).abs().max()) <= 3e-5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_stream_goes_on_where_float32_has_no_digits_left(engine: str, tokens: int) -> None:
    """2^25 + 1 is 2^25 in float32. LinearState that large must still grow by one for each token, on average over features."""
    x, value = torch.zeros(1, 1, tokens, 64), torch.full((1, 1, tokens, 3), 0.5)
    out, state = linattn.attention(x, x, value, kernel="elu", is_causal=True, return_state=True, engine=engine)
    assert isinstance(state, LinearState)
    many = 2**25
    state = replace(
        state, S=torch.full_like(state.S, many), Z=torch.full_like(state.Z, many), tokens=state.tokens + many
    )
    calls = 400 if tokens == 1 else 50
    for _ in range(calls):
        out, state = linattn.attention(
            x, x, value, kernel="elu", is_causal=True, state=state, return_state=True, engine=engine
        )
    added = calls * tokens
    torch.testing.assert_close((state.Z - many).mean(), torch.tensor(float(added)), rtol=0.1, atol=0)
    torch.testing.assert_close((state.S - many).mean(), torch.tensor(added / 2), rtol=0.1, atol=0)
    right = torch.full_like(out[:, :, -1], (many + added / 2) / (many + added))
    torch.testing.assert_close(out[:, :, -1], right, rtol=3e-7, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_reach_a_long_state(engine: str) -> None:
    x = torch.zeros(1, 1, 4, 8)
    _, state = linattn.attention(x, x, x, kernel="elu", is_causal=True, return_state=True, engine=engine)
    value = torch.ones(1, 1, 4, 2, requires_grad=True)
    long = replace(state, S=torch.ones(1, 1, 8, 2), tokens=state.tokens + 5000)
    _, after = linattn.attention(
        x, x, value, kernel="elu", is_causal=True, state=long, return_state=True, engine=engine
    )
    after.S.sum().backward()
    torch.testing.assert_close(value.grad, torch.full_like(value, 8.0))
