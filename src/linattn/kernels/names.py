"""The table of kernel names: `kernel="positive"` is a default kernel with a fixed seed."""

import difflib
from collections.abc import Callable
from importlib import import_module
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .base import Kernel
from .elementwise import Elu, Identity, Relu
from .polynomial import Polynomial
from .positive import Positive
from .softmax import Softmax
from .taylor import Taylor
from .trig import Trig


def _nearfar(dim: int) -> Kernel:
    """Imports near/far, a higher layer than the kernels, which then puts its own maker in the table."""
    import_module("linattn.nearfar")
    return NAMES["nearfar"](dim)


KernelName = Literal["softmax", "nearfar", "positive", "trig", "polynomial", "taylor", "elu", "relu", "identity"]

NAMES: dict[str, Callable[[int], Kernel]] = {
    "softmax": lambda dim: Softmax(dim),
    "nearfar": _nearfar,
    "positive": lambda dim: Positive(dim),
    "trig": lambda dim: Trig(dim),
    "polynomial": lambda dim: Polynomial(dim=dim),
    "taylor": lambda dim: Taylor(dim=dim),
    "elu": lambda dim: Elu(dim),
    "relu": lambda dim: Relu(dim),
    "identity": lambda dim: Identity(dim),
}
assert tuple(NAMES) == get_args(KernelName)

# Other names in use, for suggestions in error messages.
_ALIASES = {"exact": "softmax", "sdpa": "softmax", "near/far": "nearfar", "favor+": "positive", "linear": "identity"}


def resolve(kernel: Kernel | KernelName, dim: int, device: torch.device) -> Kernel:
    """The kernel itself, or a new default one of that name for this dim."""
    if isinstance(kernel, Kernel):
        return kernel
    return _maker(kernel)(dim).to(device)


def constant(kernel: Kernel | KernelName, query: Tensor) -> Kernel:
    """The kernel itself, or the default kernel of that name, cached by dim and device.

    Cached kernels are not handed out to callers, so no module or mode can change them.
    """
    if isinstance(kernel, Kernel):
        return kernel
    make, dim, device = _maker(kernel), query.shape[-1], query.device
    if torch.compiler.is_compiling() or isinstance(query, FakeTensor):
        return make(dim).to(device)
    found = CONSTANTS.get((kernel, dim, device))
    if found is None:
        # Modes of the caller (inference mode, fake tensors, vmap, a default device) must not affect the cached kernel.
        with _disable_current_modes(), torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.device("cpu"):
            found = CONSTANTS[kernel, dim, device] = make(dim).requires_grad_(False).to(device)
    return found


# Default kernels by name, dim and device.
CONSTANTS: dict[tuple[str, int, torch.device], Kernel] = {}


def _maker(name: object) -> Callable[[int], Kernel]:
    if not isinstance(name, str):
        raise TypeError(f"kernel must be a Kernel or a name, got {type(name).__name__}; names: {', '.join(NAMES)}.")
    if name not in NAMES:
        close = (
            [_ALIASES[name.lower()]] if name.lower() in _ALIASES else difflib.get_close_matches(name.lower(), NAMES, 1)
        )
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown kernel {name!r}; names: {', '.join(NAMES)}.{meant}")
    return NAMES[name]
