"""The one table of names, so that `kernel="positive"` means a default kernel with a fixed seed."""

from collections.abc import Callable

import torch

from .base import Kernel
from .elementwise import Elu, Relu
from .exact import Exact
from .nearfar import NearFar
from .polynomial import Polynomial
from .positive import Positive
from .taylor import Taylor
from .trig import Trig

NAMES: dict[str, Callable[[int], Kernel]] = {
    "softmax": lambda dim: NearFar(dim=dim),
    "exact": lambda dim: Exact(dim),
    "positive": lambda dim: Positive(dim),
    "trig": lambda dim: Trig(dim),
    "trig-plain": lambda dim: Trig(dim, normalize=False),
    "polynomial": lambda dim: Polynomial(dim=dim),
    "taylor": lambda dim: Taylor(dim=dim),
    "elu": lambda dim: Elu(dim),
    "relu": lambda dim: Relu(dim),
}


_built: dict[tuple[str, int, torch.device], Kernel] = {}


def resolve(kernel: "Kernel | str", dim: int, device: torch.device) -> Kernel:
    """The kernel itself, or the default of that name for this dim: the same object every time."""
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be a Kernel or a name, got {type(kernel).__name__}; names: {', '.join(NAMES)}.")
    if kernel not in NAMES:
        raise ValueError(f"unknown kernel {kernel!r}; names: {', '.join(NAMES)}.")
    if torch.compiler.is_compiling():
        return NAMES[kernel](dim).to(device)
    if (kernel, dim, device) not in _built:
        _built[kernel, dim, device] = NAMES[kernel](dim).to(device)
    return _built[kernel, dim, device]
