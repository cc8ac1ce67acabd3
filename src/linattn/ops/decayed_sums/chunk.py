"""Decayed sums by chunks of tokens: within a chunk a masked product, between chunks the state. Any device."""

from functools import partial

import torch
from torch import Tensor

from ..decays import chunk_length, decayed_products, from_start, padded_chunks, to_end
from ..heads import group_queries, match_keys, output_heads
from ..run import hide, run_rule
from .call import DecayedSumsCall
from .reference import step

CHUNK = 64


def decayed_sums(call: DecayedSumsCall) -> tuple[Tensor, Tensor]:
    """Rows (B, Ho, T, M) and last states (B * n, H, D, M)."""
    query, key, value, log_decay, mask, cu_seqlens, state, scale = call
    per_channel = log_decay is not None and log_decay.dim() == 4
    D, M, groups = key.shape[-1], value.shape[-1], output_heads(query, value) // value.shape[1]
    numbers = groups * (CHUNK + 2 * D + M) + 2 * D + (24 * D if per_channel else 0)
    segment = partial(_segment, scale=scale)
    pieces = [query, key, value, log_decay]
    return run_rule(segment, pieces, mask, cu_seqlens, state, chunk=CHUNK, numbers=numbers)


def _segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    S: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(B, Hq, T, D), (B, Hk, T, D), (B, H, T, M), mask (B, 1, T), S (B, H, D, M) -> (B, Ho, T, M), S."""
    dtype, T, H = query.dtype, value.shape[2], value.shape[1]
    query, key, value = (x.to(S.dtype) for x in (query, key, value))
    log_decay = None if log_decay is None else hide(mask, log_decay.to(S.dtype))
    key, value = hide(mask, key), hide(mask, value)
    query, key = group_queries(query * scale, H), match_keys(key, H)
    if T == 1:
        g = None if log_decay is None else log_decay[:, :, 0]
        row, S = step(S, query[:, :, :, 0], key[:, :, 0], value[:, :, 0], g)
        return row.flatten(1, 2).unsqueeze(2).to(dtype), S
    per_channel = log_decay is not None and log_decay.dim() == 4
    chunk = chunk_length(T, CHUNK, per_channel)
    key, value = padded_chunks(key, chunk, -2), padded_chunks(value, chunk, -2)  # (B, H, n, C, D)
    query = padded_chunks(query, chunk, -2).movedim(2, 3)  # (B, H, n, G, C, D)
    if log_decay is not None:
        log_decay = padded_chunks(log_decay, chunk, -2 if per_channel else -1)
    rows, S = _chunks(query, key, value, log_decay, S)
    return rows.movedim(3, 2).flatten(3, 4)[:, :, :, :T].flatten(1, 2).to(dtype), S


def _chunks(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """query (B, H, n, G, C, D), key (B, H, n, C, D), value (B, H, n, C, M) -> (B, H, n, G, C, M), S."""
    within = decayed_products(query, key, log_decay).flatten(3, 4) @ value
    total = None
    if log_decay is not None:
        started, ending = from_start(log_decay, 3).exp(), to_end(log_decay, 3).exp()
        total = started[:, :, :, -1]  # (B, H, n) or (B, H, n, D)
        if log_decay.dim() == 4:
            started, ending, total = started.unsqueeze(-1), ending.unsqueeze(-1), total.unsqueeze(-1)
        key, query, total = key * ending, query * started.unsqueeze(3), total.unsqueeze(-1)
    added = key.mT @ value  # (B, H, n, D, M)
    before = []
    for i in range(key.shape[2]):
        before.append(S)
        S = (S if total is None else S * total[:, :, i]) + added[:, :, i]
    rows = query.flatten(3, 4) @ torch.stack(before, 2) + within
    return torch.unflatten(rows, 3, query.shape[3:5]), S
