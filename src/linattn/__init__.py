"""linattn: attention whose cost grows linearly with the length of the sequence, on a CPU first."""

from typing import TYPE_CHECKING

from . import kernels, measure, nn
from ._functional import attention, implied_attention
from .nearfar import NearFar
from .sums import State

if TYPE_CHECKING:
    from types import ModuleType

__version__ = "0.1.0"

__all__ = ["NearFar", "State", "attention", "implied_attention", "kernels", "measure", "nn"]


def __getattr__(name: str) -> "ModuleType":
    if name == "hf":  # needs transformers, so it is imported when it is asked for
        import importlib

        return importlib.import_module(".hf", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
