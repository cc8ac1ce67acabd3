"""One token of an update rule: what calls of one shape have in common, and what the library's flags mean."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ffi import NO_MEMORY, NOT_FINITE

NO_SPACE = "the native engine could not get its work space"


class StepPlan(NamedTuple):
    """entry: the library's function. fixed: the address of its call structure `call`. out_like: an empty output.

    state_shape: (B, H, D, M) of the state. keep: what the structure points to.
    """

    entry: Callable[..., int]
    fixed: int
    call: Any
    out_like: Tensor
    state_shape: tuple[int, ...]
    keep: Any = None

    def run(self, *inputs: Tensor | None, state: Tensor | None, final: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and `final`, which becomes the new state. inputs: tokens, gates and mask in the library's order."""
        out = torch.empty_like(self.out_like)
        flags = self._step(self.fixed, (*inputs, state, final, out))
        if flags == NOT_FINITE and len(out) > 1:  # each entry of the batch by itself: one must not spoil the others
            single = type(self.call).from_buffer_copy(self.call)
            single.batch = 1
            for i in range(len(out)):
                parts = [None if x is None else x[i : i + 1] for x in (*inputs, state, final, out)]
                read_flags(self._step(ctypes.addressof(single), parts), parts[-1], parts[-3], parts[-2])
        elif flags:
            read_flags(flags, out, state, final)
        return out, final

    def _step(self, fixed: int, tensors: Sequence[Any]) -> int:
        """tensors: all that the library takes, in its order."""
        given = [None if x is None else x.data_ptr() for x in tensors]
        return self.entry(fixed, *given, None, torch.get_num_threads())


def read_flags(flags: int, out: Any, state: Any, final: Any) -> None:
    """For callers who look at the output: a refused step has NaN for output, and leaves the state as it was."""
    if flags == NO_MEMORY:
        raise MemoryError(NO_SPACE)
    if flags == NOT_FINITE:
        out.fill_(float("nan"))
        if state is None:
            final.zero_()
        elif final is not state:
            final.copy_(state)
