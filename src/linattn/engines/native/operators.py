"""Operators of torch, known to torch.compile by their shapes and to autograd by a backward operator."""

import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[int] | None: "int[]?",
    float: "float",
    bool: "bool",
}  # in the schema of an operator


def define(name: str, function: Callable[..., Any], schema: str) -> Any:
    """The operator linattn::name, which computes `function` on a CPU and changes none of its arguments."""
    return torch.library.custom_op(f"linattn::{name}", function, mutates_args=(), device_types="cpu", schema=schema)


def define_call(name: str, described: type[Any], function: Callable[..., Any], rest: str, results: int) -> Any:
    """The operator linattn::name, whose flat arguments are the fields of a NamedTuple, and then those of the schema `rest`.

    function: takes a `described` in place of its fields, and returns so many tensors.
    """
    fields = typing.get_type_hints(described)
    count = len(fields)
    arguments = ", ".join([*(f"{TYPES[kind]} {field}" for field, kind in fields.items()), rest])

    def flat(*given: Any) -> Any:
        return function(described(*given[:count]), *given[count:])

    return define(name, flat, f"({arguments}) -> ({', '.join(['Tensor'] * results)})")


def empty_floats(like: Tensor, *shape: int) -> Tensor:
    """An empty float32 tensor on the device of `like`, for the shapes of an operator."""
    return like.new_empty(shape, dtype=torch.float32)
