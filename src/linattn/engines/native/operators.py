"""Operators of torch, known to torch.compile by their shapes and to autograd by a backward operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def define(name: str, function: Callable[..., Any], schema: str) -> Any:
    """The operator linattn::name, which computes `function` on a CPU and changes none of its arguments."""
    return torch.library.custom_op(f"linattn::{name}", function, mutates_args=(), device_types="cpu", schema=schema)


def empty_floats(like: Tensor, *shape: int) -> Tensor:
    """An empty float32 tensor on the device of `like`, for the shapes of an operator."""
    return like.new_empty(shape, dtype=torch.float32)
