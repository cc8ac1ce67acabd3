"""Example difficulty: prediction depth, how deep into a network the class of an image is settled."""

from .depth import prediction_depth
from .knn_probe import vote
from .measurement import Measured, measure
from .probes import activations, points

__all__ = ["Measured", "activations", "measure", "points", "prediction_depth", "vote"]
