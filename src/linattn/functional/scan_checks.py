"""Checks that selective_scan and causal_conv1d share."""

import torch
from torch import Tensor

from ..states import State
from ..states.layout import FLOATS


def check_tensor(name: str, x: object, needed: str) -> Tensor:
    """x, if it is a dense floating-point tensor; needed: its shape in words."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor of {needed}, got {type(x).__name__}.")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}.")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name} must be an ordinary dense tensor, got layout {x.layout}: convert with to_dense().")
    return x if torch.compiler.is_compiling() or not x.is_neg() else x.resolve_neg()


def check_tokens(name: str, x: object) -> Tensor:
    """x, if it is a tensor (..., channels, tokens)."""
    found = check_tensor(name, x, "(..., channels, tokens)")
    if found.dim() < 2:
        raise ValueError(f"{name} must be (..., channels, tokens), got {tuple(found.shape)}.")
    return found


def check_shape(name: str, x: Tensor, needed: str, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must be {needed} = {shape}, got {tuple(x.shape)}.")


def check_device(named: dict[str, Tensor | None]) -> None:
    """All on one device."""
    elsewhere = [x for x in named.values() if x is not None and not x.is_cpu]
    if elsewhere and len({x.device for x in named.values() if x is not None}) > 1:
        places = ", ".join(f"{name} on {x.device}" for name, x in named.items() if x is not None)
        raise ValueError(f"all tensors must be on one device, got {places}.")


def read_state(state: object, kind: type[State], field: str, call: str, needed: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor `field` of a state of that kind, checked."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__} of an earlier {call} call, got {type(state).__name__}.")
    found = getattr(state, field)
    if not isinstance(found, Tensor) or found.dtype not in FLOATS or found.layout != torch.strided:
        state.validate()  # says what is wrong
    if tuple(found.shape) != shape:
        raise ValueError(f"state must be of this call's {needed} = {shape}, got {tuple(found.shape)}.")
    return check_tensor("state", found, needed)
