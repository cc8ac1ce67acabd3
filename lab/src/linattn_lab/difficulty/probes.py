"""Activations of a network: the output of any of its modules, through a forward hook."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

INPUT = "input"


class _Reached(Exception):
    """Ends a forward pass at the probed module."""


def points(model: nn.Module) -> tuple[str, ...]:
    """The input and the model's direct children, in the order in which they were made: 11 points of a ResNet-18."""
    return (INPUT, *(name for name, _ in model.named_children()))


def check_points(model: nn.Module, names: Sequence[str]) -> None:
    """Raises ValueError for a name that is none of the model's modules."""
    known = {name for name, _ in model.named_modules() if name}
    wrong = [name for name in names if name != INPUT and name not in known]
    if wrong:
        raise ValueError(
            f"the model has no module {wrong[0]!r}: a point is {INPUT!r} or a name as in model.named_modules(), "
            f"for example {', '.join(points(model)[:6])}."
        )


@torch.no_grad()
def activations(model: nn.Module, images: Tensor, point: str, batch: int = 500) -> Iterator[Tensor]:
    """The output at one point, batch by batch as (n, features).

    The pass ends at the point, so what comes after costs nothing; of a module that is called more than once it is the first
    call. The model is put into evaluation mode.
    """
    check_points(model, [point])
    model.eval()
    for part in images.split(batch):
        yield part.flatten(1) if point == INPUT else _at(model, part, point)


def _at(model: nn.Module, images: Tensor, point: str) -> Tensor:
    held: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: object) -> None:
        if not isinstance(output, Tensor):
            raise TypeError(f"a probe needs a tensor, but {point!r} puts out a {type(output).__name__}.")
        held.append(output.flatten(1).clone())  # a copy: a later module, or the next batch, may write over it
        raise _Reached

    handle = model.get_submodule(point).register_forward_hook(keep)
    try:
        model(images)
    except _Reached:
        return held[0]
    finally:
        handle.remove()
    raise ValueError(f"the model's forward pass does not come through {point!r}.")
