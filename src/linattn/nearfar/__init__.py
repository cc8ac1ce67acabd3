"""Near/far: an approximation of softmax in linear time, by exact near keys and slots that stand for the far ones."""

from .kernel import NearFar
from .state import NearFarState

__all__ = ["NearFar", "NearFarState"]
