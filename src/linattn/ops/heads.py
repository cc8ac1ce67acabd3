"""Head maps: every state head gets its key head and its group of query heads."""

import torch
from torch import Tensor


def match_keys(key: Tensor, heads: int) -> Tensor:
    """(B, Hk, T, D) -> (B, H, T, D): state head h uses key head h * Hk // H."""
    return key if key.shape[1] == heads else key.repeat_interleave(heads // key.shape[1], 1)


def group_queries(query: Tensor, heads: int) -> Tensor:
    """(B, Hq, T, D) -> (B, H, G, T, D): the G query heads that read each state head."""
    if query.shape[1] < heads:
        query = query.repeat_interleave(heads // query.shape[1], 1)
    return torch.unflatten(query, 1, (heads, query.shape[1] // heads))


def output_heads(query: Tensor, value: Tensor) -> int:
    return max(query.shape[1], value.shape[1])
