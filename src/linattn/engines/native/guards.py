"""Guards: whether the tensors of a call are like those of an earlier one, told within a microsecond.

They are those of torch.compile, which compare class, dtype, device, shape, strides, `requires_grad` and the modes of torch that
decide how an operator is dispatched. They are not a public part of torch: where they are missing, calls are compared in Python.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch.autograd import forward_ad

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]


def unwatched() -> bool:
    """Whether guards suffice: what differentiates forward, or records the operators of torch, they do not notice."""
    return forward_ad._current_level < 0 and not _len_torch_dispatch_stack() and not _is_tracing()


def guards_of(tensors: Sequence[Tensor]) -> Any:
    """An object whose check(*tensors) tells whether others are like these; None where there can be none."""
    if TensorGuards is None or len({id(x) for x in tensors}) < len(tensors):  # the guards want different objects
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
