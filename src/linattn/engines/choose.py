"""Which engine serves a call, and why."""

from types import ModuleType

from torch import Tensor

from ..kernels.base import Kernel
from ..sums.state import State, Sums
from . import native, torch_engine

NAMES = ("auto", "torch", "native")


def choose(
    engine: str, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, why_not: str | None = None
) -> ModuleType:
    """The engine of that name; "auto" is the native one wherever it can serve the call.

    why_not: a reason why the native engine cannot, if one is known already.
    """
    if engine not in NAMES:
        raise ValueError(f"unknown engine {engine!r}; engines: {', '.join(NAMES)}.")
    if engine == "torch":
        return torch_engine
    why_not = native.refusal(kernel, query, key, value) or why_not
    if why_not is None:
        return native
    if engine == "native":
        raise ValueError(f'engine="native" cannot serve this call: {why_not}. engine="torch" can.')
    return torch_engine


def step(
    engine: str, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float | None, state: State, gqa: bool
) -> tuple[Tensor, State] | None:
    """The short way of a one-token call that goes on from a state, where there is one."""
    if engine not in ("auto", "native") or not native.available():
        return None
    if not (isinstance(state, Sums) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    return native.step(query, key, value, kernel, scale, state, gqa)


def whole(
    engine: str, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float | None, causal: bool, gqa: bool
) -> Tensor | None:
    """The short way of a plain call from nothing that leaves no state, where there is one."""
    if engine not in ("auto", "native") or not native.available():
        return None
    if not (isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    return native.whole(query, key, value, kernel, scale, causal, gqa)


def describe() -> dict[str, str]:
    """Engine -> whether it can be used, and why not."""
    return {"torch": "available: any device, any kernel", "native": native.describe()}
