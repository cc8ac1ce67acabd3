"""Float32 calls do not depend on torch's default number type."""

from collections.abc import Iterator

import pytest
import torch

import linattn
from linattn.kernels import Elu, Kernel, Positive
from linattn.nearfar.kernel import NearFar
from native_support import needs_native

pytestmark = needs_native


@pytest.fixture
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


KERNELS = {
    "elu": lambda: Elu(),
    "positive": lambda: Positive(16, features=32),
    "positive-ragged": lambda: Positive(16, features=20),
    "near/far": lambda: NearFar(window=16, slots=16, block=8),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_float32_under_a_float64_default(name: str, is_causal: bool, doubles: None) -> None:
    kernel: Kernel = KERNELS[name]()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 90, 16, generator=generator, dtype=torch.float32) for _ in range(3))
    options = {"kernel": kernel, "is_causal": is_causal}
    out = linattn.attention(q, k, v, engine="native", **options)
    expected = linattn.attention(q.double(), k.double(), v.double(), engine="torch", **options)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_steps_under_a_float64_default(name: str, doubles: None) -> None:
    kernel: Kernel = KERNELS[name]()
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 2, 60, 16, generator=generator, dtype=torch.float32) for _ in range(3)]
    whole = linattn.attention(*x, kernel=kernel, is_causal=True, engine="native")
    options = {"kernel": kernel, "is_causal": True, "return_state": True, "engine": "native"}
    out, state = linattn.attention(*(y[:, :, :50] for y in x), **options)
    rows = [out]
    for t in range(50, 60):
        out, state = linattn.attention(*(y[:, :, t : t + 1] for y in x), state=state, **options)
        rows.append(out)
    torch.testing.assert_close(torch.cat(rows, 2), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_under_a_float64_default(is_causal: bool, doubles: None) -> None:
    kernel = Positive(16, features=32)
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 2, 90, 16, generator=generator, dtype=torch.float32).requires_grad_() for _ in range(3)]
    y = [t.detach().double().requires_grad_() for t in x]
    native = linattn.attention(*x, kernel=kernel, is_causal=is_causal, engine="native")
    exact = linattn.attention(*y, kernel=kernel, is_causal=is_causal, engine="torch")
    grads = torch.autograd.grad(native.square().sum(), x), torch.autograd.grad(exact.square().sum(), y)
    for mine, right in zip(*grads, strict=True):
        assert (mine.double() - right).abs().max() <= 1e-5 * right.abs().max()
