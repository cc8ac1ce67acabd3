"""Transformers whose weights are set by hand: selectors, the designs made of them, and their learned twins."""

from .designs import DESIGNS, Design
from .head import Trace, Weights, single_head
from .learn import count_exact, learn, mean_squared_error
from .selectors import Selector, aggregate, by_content, by_mirror, by_position
from .twin import TorchHead

__all__ = [
    "DESIGNS",
    "Design",
    "Selector",
    "TorchHead",
    "Trace",
    "Weights",
    "aggregate",
    "by_content",
    "by_mirror",
    "by_position",
    "count_exact",
    "learn",
    "mean_squared_error",
    "single_head",
]
