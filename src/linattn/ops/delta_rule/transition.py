"""A segment of the delta rule as an affine map of the state before it: S -> transition @ S + local.

Maps compose, so that segments can be processed apart from each other (sequence parallelism) and combined afterwards.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import chunk
from .call import DeltaRuleCall

Rule = Callable[[DeltaRuleCall], tuple[Tensor, Tensor]]
Affine = tuple[Tensor, Tensor]


def transition(call: DeltaRuleCall, rule: Rule = chunk.delta_rule) -> Affine:
    """The tokens of one segment -> local (B, H, D, M), transition (B, H, D, D). Queries, state and scale are not used.

    The columns of S do not affect each other, so both come from one run of the rule: on values with D columns of zeros
    appended, from the state [0 | identity].
    """
    key, value = call.key, call.value
    (B, H, T, M), D = value.shape, key.shape[-1]
    dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
    one = torch.eye(D, dtype=dtype, device=key.device).expand(B, H, D, D)
    start = torch.cat([one.new_zeros(B, H, D, M), one], -1)
    values = torch.cat([value, value.new_zeros(B, H, T, D)], -1)
    _, last = rule(call._replace(query=key, value=values, cu_seqlens=None, state=start, scale=1.0))
    local, moved = last.split([M, D], -1)
    return local, moved


def combine(earlier: Affine, later: Affine) -> Affine:
    """The map of two segments, one after the other."""
    return later[1] @ earlier[0] + later[0], later[1] @ earlier[1]
