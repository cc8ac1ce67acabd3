"""Near/far: softmax kept faithful in linear time, by exact near keys and slots that stand for the far ones."""

from ..kernels.nearfar import NearFar
from .state import NearFarState

__all__ = ["NearFar", "NearFarState"]
