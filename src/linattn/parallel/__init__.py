"""Sequence parallelism over torch.distributed: a sequence whose tokens several processes share."""

from .attention import attention
from .causal_conv1d import causal_conv1d
from .context import sequence_parallel
from .delta_rule import delta_rule
from .messages import count_traffic
from .selective_scan import selective_scan
from .sequences import mean_loss, next_labels, positions, shard, unshard

__all__ = [
    "attention",
    "causal_conv1d",
    "count_traffic",
    "delta_rule",
    "mean_loss",
    "next_labels",
    "positions",
    "selective_scan",
    "sequence_parallel",
    "shard",
    "unshard",
]
