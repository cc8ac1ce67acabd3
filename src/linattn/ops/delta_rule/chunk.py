"""The delta rule by chunks of tokens: matrix products and one triangular solve for each chunk, on any device.

With S the state before a chunk and u_i = beta_i (v_i - k_i^T S_i) the correction that token i writes,

    u_i + beta_i sum_(j < i) (k_i . k_j decayed from j to i) u_j = beta_i v_i - beta_i (k_i decayed from the start)^T S,

a unit lower triangular system, solved for the parts that do not depend on S first (the UT transform).
"""

from functools import partial

import torch
from torch import Tensor

from ..decays import chunk_length, decayed_products, from_start, padded_chunks, to_end
from ..heads import group_queries, match_keys, output_heads
from ..run import hide, run_rule
from .call import DeltaRuleCall
from .reference import normalized, step

CHUNK = 64


def delta_rule(call: DeltaRuleCall) -> tuple[Tensor, Tensor]:
    """Rows (B, Ho, T, M) and last states (B * n, H, D, M)."""
    query, key, value, beta, log_decay, mask, cu_seqlens, state, scale, normalize_qk = call
    per_channel = log_decay is not None and log_decay.dim() == 4
    D, M, groups = key.shape[-1], value.shape[-1], output_heads(query, value) // value.shape[1]
    numbers = (groups + 1) * (CHUNK + 2 * D) + 2 * M + (24 * D if per_channel else 0)
    segment = partial(_segment, scale=scale, normalize_qk=normalize_qk)
    pieces = [query, key, value, beta, log_decay]
    return run_rule(segment, pieces, mask, cu_seqlens, state, chunk=CHUNK, numbers=numbers)


def _segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    mask: Tensor | None,
    S: Tensor,
    *,
    scale: float,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor]:
    """(B, Hq, T, D), (B, Hk, T, D), (B, H, T, M), (B, H, T), mask (B, 1, T), S (B, H, D, M) -> (B, Ho, T, M), S."""
    dtype, T, H = query.dtype, value.shape[2], value.shape[1]
    query, key, value, beta = (x.to(S.dtype) for x in (query, key, value, beta))
    log_decay = None if log_decay is None else hide(mask, log_decay.to(S.dtype))
    key, value, beta = hide(mask, key), hide(mask, value), hide(mask, beta)
    if normalize_qk:
        query, key = normalized(query), normalized(key)
    query, key = group_queries(query * scale, H), match_keys(key, H)
    if T == 1:
        g = None if log_decay is None else log_decay[:, :, 0]
        row, S = step(S, query[:, :, :, 0], key[:, :, 0], value[:, :, 0], beta[:, :, 0], g)
        return row.flatten(1, 2).unsqueeze(2).to(dtype), S
    per_channel = log_decay is not None and log_decay.dim() == 4
    chunk = chunk_length(T, CHUNK, per_channel)
    key, value = padded_chunks(key, chunk, -2), padded_chunks(value, chunk, -2)  # (B, H, n, C, D)
    query = padded_chunks(query, chunk, -2).movedim(2, 3)  # (B, H, n, G, C, D)
    beta = padded_chunks(beta, chunk, -1)
    if log_decay is not None:
        log_decay = padded_chunks(log_decay, chunk, -2 if per_channel else -1)
    rows, S = _chunks(query, key, value, beta, log_decay, S)
    return rows.movedim(3, 2).flatten(3, 4)[:, :, :, :T].flatten(1, 2).to(dtype), S


def _chunks(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """query (B, H, n, G, C, D), key (B, H, n, C, D), value (B, H, n, C, M), beta (B, H, n, C) -> (B, H, n, G, C, M), S."""
    products = decayed_products(torch.cat([query, key.unsqueeze(3)], 3), key, log_decay)  # (B, H, n, G + 1, C, C)
    scores, overlap = products[:, :, :, :-1], products[:, :, :, -1]
    late_key, total = key, None
    early_key = key
    if log_decay is not None:
        started, ending = from_start(log_decay, 3).exp(), to_end(log_decay, 3).exp()
        total = started[:, :, :, -1]  # (B, H, n) or (B, H, n, D)
        if log_decay.dim() == 4:
            started, ending, total = started.unsqueeze(-1), ending.unsqueeze(-1), total.unsqueeze(-1)
        early_key, late_key, query = key * started, key * ending, query * started.unsqueeze(3)
        total = total.unsqueeze(-1)  # over the rows of S
    system = (overlap * beta.unsqueeze(-1)).tril(-1)
    right = torch.cat([value, early_key], -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, readers = solved.split([value.shape[-1], key.shape[-1]], -1)  # (B, H, n, C, M), (B, H, n, C, D)
    before, written = [], []
    for i in range(key.shape[2]):
        before.append(S)
        update = fresh[:, :, i] - readers[:, :, i] @ S
        written.append(update)
        S = (S if total is None else S * total[:, :, i]) + late_key[:, :, i].mT @ update
    states, updates = torch.stack(before, 2), torch.stack(written, 2)  # (B, H, n, D, M), (B, H, n, C, M)
    rows = query.flatten(3, 4) @ states + scores.flatten(3, 4) @ updates
    return torch.unflatten(rows, 3, query.shape[3:5]), S
