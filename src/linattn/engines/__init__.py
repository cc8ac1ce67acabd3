"""Engines: torch (any device) and native (C++ for CPUs). plan.py decides which one serves a call."""

from . import native
from .call import ENGINES, Call, EngineName
from .native.output_pool import release
from .plan import choose, describe, serves_natively

__all__ = ["ENGINES", "Call", "EngineName", "choose", "describe", "native", "release", "serves_natively"]
