"""One token of an update rule: what calls of one shape have in common, and what the library's flags mean."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ffi import NO_MEMORY, NOT_FINITE

NO_SPACE = "the native engine could not get its work space"


class StepPlan(NamedTuple):
    """entry: the library's function. fixed: the address of its call structure, which is `keep`. out_like: an empty output.

    state_shape: (B, H, D, M) of the state.
    """

    entry: Callable[..., int]
    fixed: int
    keep: Any
    out_like: Tensor
    state_shape: tuple[int, ...]

    def run(self, *inputs: Tensor | None, state: Tensor | None, final: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and `final`, which becomes the new state. inputs: tokens, gates and mask in the library's order."""
        out = torch.empty_like(self.out_like)
        given = [None if x is None else x.data_ptr() for x in (*inputs, state)]
        flags = self.entry(self.fixed, *given, final.data_ptr(), out.data_ptr(), None, torch.get_num_threads())
        if flags:
            read_flags(flags, out, state, final)
        return out, final


def read_flags(flags: int, out: Tensor, state: Tensor | None, final: Tensor) -> None:
    """For callers who look at the output: a refused step has NaN for output, and leaves the state as it was."""
    if flags == NO_MEMORY:
        raise MemoryError(NO_SPACE)
    if flags == NOT_FINITE:
        out.fill_(float("nan"))
        if state is None:
            final.zero_()
        elif final is not state:
            final.copy_(state)
