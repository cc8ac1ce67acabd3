"""Kernels: similarities of queries and keys, and their feature maps. One family per file."""

from .base import Kernel
from .custom import Custom
from .elementwise import Elu, Identity, Relu
from .learned import Learned
from .names import NAMES, KernelName, resolve
from .polynomial import Polynomial
from .positive import Positive
from .precondition import Precondition
from .softmax import Softmax
from .taylor import Taylor
from .trig import Trig

__all__ = [
    "NAMES",
    "Custom",
    "Elu",
    "Identity",
    "Kernel",
    "KernelName",
    "Learned",
    "Polynomial",
    "Positive",
    "Precondition",
    "Relu",
    "Softmax",
    "Taylor",
    "Trig",
    "resolve",
]
