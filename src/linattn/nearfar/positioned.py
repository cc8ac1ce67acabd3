"""Queries and keys with the positions that biases need, as further coordinates (`biases.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.base import compute_dtype
from ..ops.packing import Packing
from .biases import SLOPE_UNIT, TABLE_UNIT
from .kernel import NearFar

Tokens = tuple[Tensor, Tensor, Tensor]  # query (B, Hq, L, D), key (B, H, S, D), value (B, H, S, M)


def with_positions(kernel: NearFar, tokens: Tokens, scale: float | None, position: Tensor) -> tuple[Tokens, float]:
    """The tokens of a call of a kernel with position biases, in at least float32, and the scale of the call.

    position: (B, S), of the keys; the queries are at the last of them.
    """
    dtype = compute_dtype(tokens[0].dtype)
    query, key, value = (x.to(dtype) for x in tokens)
    scale = kernel.logit_scale(query.shape[-1], scale)
    heads, root = query.shape[1], scale**0.5  # keys and queries are multiplied by the root later on
    places = position.to(dtype)[:, None, :, None] / root
    if kernel.alibi_slopes is not None:
        _check_heads("alibi_slopes", kernel.alibi_slopes, heads)
        slopes = (kernel.alibi_slopes.to(query) / (SLOPE_UNIT * root)).reshape(1, -1, 1, 1)
        return (
            torch.cat([query, slopes.expand(*query.shape[:3], 1)], -1),
            torch.cat([key, (places * SLOPE_UNIT).expand(*key.shape[:3], 1)], -1),
            value,
        ), scale
    table = kernel.bias_table()
    assert table is not None
    _check_heads("position_bias", table, heads)
    own = places[:, :, key.shape[2] - query.shape[2] :] * TABLE_UNIT
    query = torch.cat([pad(query, (0, 1)), own.expand(*query.shape[:3], 1)], -1)
    key = pad(torch.cat([key, (places * TABLE_UNIT).expand(*key.shape[:3], 1)], -1), (0, 1))
    return (query, key, value), scale


def one_token(kernel: NearFar, tokens: Tokens, scale: float | None, place: int) -> tuple[Tokens, float]:
    """`with_positions` of one token at the same place in all sequences, in few operations; heads have been checked."""
    dtype = compute_dtype(tokens[0].dtype)
    query, key, value = (x if x.dtype is dtype else x.to(dtype) for x in tokens)
    scale = kernel.logit_scale(query.shape[-1], scale)
    root = scale**0.5
    if kernel.alibi_slopes is None:
        query = pad(pad(query, (0, 1)), (0, 1), value=place / root * TABLE_UNIT)
        key = pad(pad(key, (0, 1), value=place / root * TABLE_UNIT), (0, 1))
        return (query, key, value), scale
    known = kernel.__dict__.get("_query_slopes")  # kept from token to token: what it was made of, and the coordinate
    if known is None or known[0] != (root, dtype) or not torch.equal(known[1], kernel.alibi_slopes):
        slopes = kernel.alibi_slopes.clone()
        own = (slopes.to(query) / (SLOPE_UNIT * root)).reshape(1, -1, 1, 1)
        known = kernel.__dict__["_query_slopes"] = ((root, dtype), slopes, own)
    query = torch.cat([query, known[2].expand(query.shape[0], -1, 1, 1)], -1)
    return (query, pad(key, (0, 1), value=place / root * SLOPE_UNIT), value), scale


def check_call(kernel: NearFar, queries: int, keys: int, *, is_causal: bool, state: bool) -> None:
    """Refuses calls whose queries have no positions among the keys. state: whether the call takes or returns one."""
    if kernel.alibi_slopes is not None and not is_causal:
        raise ValueError("alibi_slopes are for causal attention: pass is_causal=True.")
    if kernel.position_bias is None:
        return
    if is_causal and queries > keys:
        raise ValueError(f"position_bias needs a key for every query, got {queries} queries and {keys} keys.")
    if not is_causal and (queries != keys or state):
        raise ValueError(
            "without is_causal, position_bias needs queries and keys of the same tokens, and neither takes nor returns a "
            f"state; got {queries} queries and {keys} keys."
        )


def key_positions(
    keys: tuple[int, int], mask: Tensor | None, packing: Packing | None, start: Tensor | None, device: torch.device
) -> Tensor:
    """(B, S): visible tokens before each key, in its own sequence.

    keys: B and S. mask: (B, S) or None. start: tokens that earlier calls have seen, one for each sequence, or None.
    """
    B, S = keys
    if mask is None:
        before = torch.arange(S, device=device).expand(B, S)
    else:
        before = mask.cumsum(-1) - mask.long()
    if packing is None:
        return before if start is None else before + start.reshape(B, 1)
    lengths = torch.tensor(packing.lengths, device=device)
    sequence = torch.arange(packing.count, device=device).repeat_interleave(lengths)  # (S)
    first = torch.tensor(packing.bounds[:-1], device=device).clamp_max(max(0, S - 1))
    offset = -before[:, first] if S > 0 else before.new_zeros(B, packing.count)
    if start is not None:
        offset = offset + start.reshape(B, packing.count)
    return before + offset[:, sequence]


def plain_positions(keys: int, start: Sequence[int]) -> Tensor:
    """(B, S) of a call without masks, on a CPU. start: tokens that each sequence has seen."""
    if len(set(start)) == 1:
        return torch.arange(start[0], start[0] + keys).expand(len(start), keys)
    return torch.tensor(start).unsqueeze(-1) + torch.arange(keys)


def _check_heads(name: str, given: Tensor, heads: int) -> None:
    if given.shape[0] != heads:
        raise ValueError(f"NearFar has {name} for {given.shape[0]} query heads, but the call has {heads}.")
