"""What the tests of the native engine share: kernels, instruction sets, and the float64 truth."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linattn
from linattn.engines import native
from linattn.engines.native.ffi import ISA_LEVELS, library
from linattn.kernels import Custom, Elu, Learned, Polynomial, Positive, Precondition, Relu, Taylor, Trig
from linattn.ops.linear_attention import reference as oracle

DIM = 12

needs_native = pytest.mark.skipif(not native.available(), reason=f"native engine: {library.why_not}")


def _supported(isa: str) -> bool:
    if not native.available():
        return False
    before = library.isa
    try:
        library.set_isa(isa)
    except ValueError:
        return False
    finally:
        library.set_isa(before)
    return True


isas = [pytest.param(isa, marks=pytest.mark.skipif(not _supported(isa), reason=f"no {isa} here")) for isa in ISA_LEVELS]


@pytest.fixture(params=isas)
def isa(request: pytest.FixtureRequest):
    """Runs a test on every instruction set this CPU has."""
    before = library.isa
    library.set_isa(request.param)
    yield request.param
    library.set_isa(before)


def _preconditioned() -> Positive:
    torch.manual_seed(5)
    q, k = torch.randn(1, 2, 64, DIM) + 1, torch.randn(1, 2, 64, DIM) - 0.5
    return Positive(DIM, features=20, precondition=Precondition.from_samples(q, k))


KERNELS = {
    "positive": lambda: Positive(DIM, features=40),
    "positive-wide": lambda: Positive(DIM, features=150, orthogonal=False, seed=3),
    "favor++": lambda: Positive(DIM, features=18, hyperbolic=True, optimal=True),
    "preconditioned": _preconditioned,
    "trig": lambda: Trig(DIM, features=21),
    "elu": Elu,
    "relu": Relu,
    "polynomial": lambda: Polynomial(degree=2),
    "polynomial-bare": lambda: Polynomial(degree=2, offset=0),
    "taylor": lambda: Taylor(order=2),
    "learned": lambda: Learned(DIM, features=10),
    "custom": lambda: Custom(torch.nn.functional.softplus),
}
kernels = pytest.mark.parametrize("name", KERNELS)


def tokens(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest number expected."""
    assert got.shape == expected.shape
    top = expected.abs().max().item() if expected.numel() else 0.0
    error = (got.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    assert error <= tolerance * max(top, 1e-6), f"{error:.3g} off, the largest number being {top:.3g}"


def truth(query: Tensor, key: Tensor, value: Tensor, kernel, **options) -> Tensor:
    """The O(N^2) twin in float64."""
    options = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in options.items()}
    return oracle.attention(query.double(), key.double(), value.double(), kernel, **options)


def native_attention(query: Tensor, key: Tensor, value: Tensor, kernel, **options):
    return linattn.attention(query, key, value, kernel=kernel, engine="native", enable_gqa=True, **options)


def side_by_side(work: Callable[[int], None], count: int) -> None:
    """Runs work(0) .. work(count - 1), each in a thread of its own."""
    workers = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
