"""Which engine serves a call, and why."""

from types import ModuleType

from . import torch_engine

NAMES = ("auto", "torch", "native")


def choose(engine: str) -> ModuleType:
    """The engine of that name; "auto" is the best that can serve the call."""
    if engine not in NAMES:
        raise ValueError(f"unknown engine {engine!r}; engines: {', '.join(NAMES)}.")
    if engine == "native":
        raise ValueError('engine="native" is not part of this build; engine="torch" serves every call.')
    return torch_engine


def describe() -> dict[str, str]:
    """Engine -> whether it can be used, and why not."""
    return {"torch": "available: any device, any kernel", "native": "not part of this build"}
