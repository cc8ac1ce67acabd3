"""Measurements: fidelity, cost, time and memory."""

from .clock import Timing, peak_memory, timing
from .cost import Cost, cost
from .fidelity import Fidelity, fidelity

__all__ = ["Cost", "Fidelity", "Timing", "cost", "fidelity", "peak_memory", "timing"]
