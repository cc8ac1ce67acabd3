"""Sequence parallelism over torch.distributed: a sequence whose tokens several processes share."""

from .attention import attention
from .causal_conv1d import causal_conv1d
from .delta_rule import delta_rule
from .messages import count_traffic
from .selective_scan import selective_scan

__all__ = ["attention", "causal_conv1d", "count_traffic", "delta_rule", "selective_scan"]
