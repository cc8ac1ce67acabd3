"""Kernels: what the similarity of a query and a key is, and the features it is made of. One family per file."""

from .base import Kernel
from .custom import Custom
from .elementwise import Elu, Relu
from .exact import Exact
from .learned import Learned
from .names import NAMES, resolve
from .polynomial import Polynomial
from .positive import Positive
from .precondition import Precondition
from .taylor import Taylor
from .trig import Trig

__all__ = [
    "NAMES",
    "Custom",
    "Elu",
    "Exact",
    "Kernel",
    "Learned",
    "Polynomial",
    "Positive",
    "Precondition",
    "Relu",
    "Taylor",
    "Trig",
    "resolve",
]
