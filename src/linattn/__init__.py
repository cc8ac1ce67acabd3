"""linattn: attention whose cost grows linearly with the length of the sequence, on a CPU first."""

from . import kernels, measure
from ._functional import attention, implied_attention
from .nearfar import NearFar
from .sums import State

__version__ = "0.1.0"

__all__ = ["NearFar", "State", "attention", "implied_attention", "kernels", "measure"]
