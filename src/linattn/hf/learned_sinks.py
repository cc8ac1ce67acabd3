"""Learned sinks (gpt-oss): a logit for each head that takes its share of the softmax and has no value.

As a token of its own in front of the others: all keys and queries get one more coordinate, which is 0 in every key but that
one, and its value is 0. Near/far keeps the first tokens exactly, so that the sink stays exact too.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """query (B, Hq, L, D), key (B, H, S, D), value (B, H, S, M), key_mask (B, S) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None


def as_a_token(tokens: Tokens, sinks: Tensor, scale: float, first: bool) -> Tokens:
    """The same attention without sinks. sinks: (Hq), the logits. first: these are the first tokens, so that the sink is added
    in front of them: to the keys, and to queries that are at the same places."""
    query, key, value, key_mask = tokens
    extra = (sinks.to(query.dtype) / scale).reshape(1, -1, 1, 1).expand(*query.shape[:3], 1)
    square = query.shape[2] == key.shape[2]
    query, key = torch.cat([query, extra], -1), torch.nn.functional.pad(key, (0, 1))
    if not first:
        return Tokens(query, key, value, key_mask)
    key, value = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (key, value))
    key = torch.cat(
        [torch.cat([torch.zeros_like(key[:, :, :1, :-1]), torch.ones_like(key[:, :, :1, -1:])], -1), key[:, :, 1:]], 2
    )
    if square:
        query = torch.nn.functional.pad(query, (0, 0, 1, 0))
    if key_mask is not None:
        key_mask = torch.nn.functional.pad(key_mask, (1, 0), value=True)
    return Tokens(query, key, value, key_mask)
