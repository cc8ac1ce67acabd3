"""Engines: who computes the sums. `choose` picks one; each offers absorb, read and causal."""

from . import native
from .choose import NAMES, choose, describe, step, whole
from .native.memory import release

__all__ = ["NAMES", "choose", "describe", "native", "release", "step", "whole"]
