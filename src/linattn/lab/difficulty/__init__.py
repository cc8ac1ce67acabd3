"""Example difficulty: how deep into a network a picture's class is settled, and what makes pictures deep."""

from .depth import prediction_depth
from .measuring import Measured, measure
from .neighbours import vote
from .probes import activations, points

__all__ = ["Measured", "activations", "measure", "points", "prediction_depth", "vote"]
