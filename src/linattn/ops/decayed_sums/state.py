"""The state of decayed sums without any rows: one matrix product for each segment of tokens."""

import torch
from torch import Tensor

from .. import segments
from ..decays import to_end
from ..heads import match_keys
from ..run import hide, initial_state
from .call import DecayedSumsCall

CHUNK = 64


def last_state(call: DecayedSumsCall) -> Tensor:
    """S (B, H, D, M) after the tokens of one sequence. Queries and scale are not used."""
    key, value, mask = call.key, call.value, call.mask
    state = initial_state(call.query, key, value, 1) if call.state is None else call.state
    B, H, T, _ = value.shape
    if T == 0 or B == 0:
        return state.clone()
    cuts = segments.lengths(T, B * H * 4 * key.shape[-1], CHUNK)
    pieces = [key, value, call.log_decay, None if mask is None else mask.unsqueeze(1)]
    return segments.run(_segment, pieces, state, cuts)[1]


def _segment(
    key: Tensor, value: Tensor, log_decay: Tensor | None, mask: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """(B, Hk, T, D), (B, H, T, M), (B, H, T) or (B, H, T, D), mask (B, 1, T), S (B, H, D, M) -> no rows (B, H, T, 0), S."""
    none = value[..., :0]
    key, value = hide(mask, key.to(S.dtype)), hide(mask, value.to(S.dtype))
    key = match_keys(key, value.shape[1])
    if log_decay is None:
        return none, S + _sum_of_products(key, value)
    # float64: the logarithms of a long segment add up
    decay = hide(mask, log_decay.double())
    rest, total = to_end(decay, 2).exp().to(S.dtype), decay.sum(2).exp().to(S.dtype)
    if decay.dim() == 3:
        rest, total = rest.unsqueeze(-1), total.unsqueeze(-1)
    return none, S * total.unsqueeze(-1) + _sum_of_products(key * rest, value)


def _sum_of_products(key: Tensor, value: Tensor, block: int = 256) -> Tensor:
    """key^T value (B, H, D, M), summed by blocks of tokens: one long product would add token after token."""
    T = key.shape[2]
    whole = T - T % block
    total = key[:, :, whole:].mT @ value[:, :, whole:]
    if whole:
        blocks = (torch.unflatten(x[:, :, :whole], 2, (-1, block)) for x in (key, value))
        first, second = blocks
        total = total + (first.mT @ second).sum(2)
    return total
