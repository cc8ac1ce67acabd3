"""Transformers whose weights are set by hand: selectors, designs built from them, and trained counterparts."""

from .designs import DESIGNS, Design
from .numpy_head import Trace, Weights, single_head
from .robust import learn_robust
from .selectors import Selector, aggregate, by_content, by_mirror, by_position
from .torch_head import TorchHead
from .training import count_exact, learn, mean_squared_error

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
    "learn_robust",
    "mean_squared_error",
    "single_head",
]
