"""Sequence parallelism over torch.distributed: a sequence whose tokens several processes share."""

from .attention import attention
from .messages import count_traffic

__all__ = ["attention", "count_traffic"]
