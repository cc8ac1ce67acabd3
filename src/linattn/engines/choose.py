"""Which engine serves a call, and why."""

from types import ModuleType

from torch import Tensor

from ..kernels.base import Kernel
from . import native, torch_engine

NAMES = ("auto", "torch", "native")


def choose(engine: str, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> ModuleType:
    """The engine of that name; "auto" is the native one wherever it can serve the call."""
    if engine not in NAMES:
        raise ValueError(f"unknown engine {engine!r}; engines: {', '.join(NAMES)}.")
    if engine == "torch":
        return torch_engine
    why_not = native.refusal(kernel, query, key, value)
    if why_not is None:
        return native
    if engine == "native":
        raise ValueError(f'engine="native" cannot serve this call: {why_not}. engine="torch" can.')
    return torch_engine


def describe() -> dict[str, str]:
    """Engine -> whether it can be used, and why not."""
    return {"torch": "available: any device, any kernel", "native": native.describe()}
