"""The portable engine: chunked matrix products in torch, on any device, with any kernel.

Long sequences go through in stretches whose features fit a fixed budget. In training each stretch is checkpointed: its
features are computed again in the backward pass, so that nothing of size tokens x features is ever kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..kernels.base import Kernel, compute_dtype
from ..sums import chunks
from ..sums.state import Sums

CHUNK = 128  # tokens of a causal chunk: wide enough for matrix products, narrow enough to waste little on its mask
BUDGET = 2**22  # numbers in the features of a stretch (16 MiB of float32)
COMPILED_BUDGET = 2**25  # torch.compile unrolls the loop over stretches, so it gets fewer of them


def absorb(
    kernel: Kernel,
    key: Tensor,
    value: Tensor,
    state: Sums,
    *,
    scale: float | None,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    log_input: Tensor | None,
) -> Sums:
    """The state after adding keys (B, H, S, D) and values (B, H, S, M)."""

    def stretch(
        k: Tensor, v: Tensor, mask: Tensor | None, decay: Tensor | None, gain: Tensor | None, sums: Tensor, level: Tensor
    ) -> Any:
        features, beta, values = _keys(kernel, k, v, mask, _gate(decay, gain), scale)
        return _decayed(*chunks.absorb(features, beta, values, sums, level), decay)

    sums, level = _join(state), state.log_scale
    run, lengths = _plan(stretch, key, kernel, key.shape[-2])
    for pieces in _pieces(lengths, key, value, key_mask, log_decay, log_input):
        sums, level = run(*pieces, sums, level)
    return _split(state, sums, level, _count(key, key_mask))


def read(kernel: Kernel, query: Tensor, state: Sums, *, scale: float | None) -> tuple[Tensor, Sums]:
    """What queries (B, Hq, L, D) get from a state: (B, Hq, L, M)."""
    B, heads, L = query.shape[:3]
    H = state.Z.shape[1]
    sums = _join(state)

    def stretch(query: Tensor, sums: Tensor) -> Any:
        features = kernel.scaled_query_features(query, scale=scale)[0]
        return chunks.divide(features.reshape(B, H, -1, features.shape[-1]) @ sums)

    run, lengths = _plan(stretch, query, kernel, L)
    rows, small = [], torch.zeros_like(state.guarded)
    for (q,) in _pieces(lengths, query):
        out, guarded = run(q, sums)
        rows.append(out.reshape(B, heads, q.shape[-2], -1))
        small = small + guarded.sum(-1)
    out = torch.cat(rows, -2) if rows else query.new_zeros(B, heads, 0, state.value_dim)
    return out, replace(state, guarded=state.guarded + small * (state.tokens > 0))


def causal(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Sums,
    *,
    scale: float | None,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    log_input: Tensor | None,
) -> tuple[Tensor, Sums]:
    """Queries (B, Hq, T, D) against the state and the keys up to their own; and the state after them.

    log_decay (B, H, T) multiplies the sums before each token is added, log_input (B, H, T) the token itself.
    """
    B, heads, T = query.shape[:3]
    H = key.shape[1]

    def stretch(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, decay: Tensor | None, gain: Tensor | None, sums: Tensor, level: Tensor
    ) -> Any:
        features, beta, values = _keys(kernel, k, v, mask, _gate(decay, gain), scale)
        query_features = kernel.scaled_query_features(q, scale=scale)[0]
        query_features = query_features.reshape(B, H, heads // H, q.shape[-2], -1)
        chunk = min(CHUNK, q.shape[-2])
        out, sums, level = chunks.causal(query_features, features, beta, values, sums, level, chunk)
        out, guarded = chunks.divide(out)
        sums, level = _decayed(sums, level, decay)
        return out.reshape(B, heads, q.shape[-2], -1), guarded.sum((-2, -1)), sums, level

    sums, level = _join(state), state.log_scale
    run, lengths = _plan(stretch, query, kernel, T, multiple=CHUNK)
    rows, guarded = [], torch.zeros_like(state.guarded)
    for pieces in _pieces(lengths, query, key, value, key_mask, log_decay, log_input):
        out, small, sums, level = run(*pieces, sums, level)
        rows.append(out)
        guarded = guarded + small
    out = torch.cat(rows, -2) if rows else query.new_zeros(B, heads, 0, value.shape[-1])
    if key_mask is not None:  # rows that saw no key at all are 0 by right, not by the guard
        blind = (key_mask.cumsum(-1) == 0).sum(-1, keepdim=True) * (heads // H)
        guarded = guarded - blind * (state.tokens == 0)
    new = _split(state, sums, level, _count(key, key_mask))
    return out, replace(new, guarded=state.guarded + guarded)


def _keys(
    kernel: Kernel, key: Tensor, value: Tensor, mask: Tensor | None, gate: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Features, log-weights and values with a column of ones. A masked key counts nothing, even if it holds NaN."""
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    features, beta = kernel.scaled_key_features(key, scale=scale)
    if gate is not None:
        beta = gate if beta is None else beta.to(gate.dtype) + gate
    if mask is not None:
        if beta is None:
            features = features.masked_fill(~mask[:, None, :, None], 0)
        else:
            beta = beta.masked_fill(~mask[:, None, :], -torch.inf)
    value = value.to(compute_dtype(value.dtype))
    return features, beta, torch.cat([value, torch.ones_like(value[..., :1])], -1)


def _gate(log_decay: Tensor | None, log_input: Tensor | None) -> Tensor | None:
    """Decay as a log-weight of each key: dividing key j by all the decay up to j is the same as decaying it later on."""
    if log_decay is None:
        return None
    gate = -log_decay.double().cumsum(-1)
    return gate if log_input is None else gate + log_input


def _decayed(sums: Tensor, level: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Applies a stretch's decay to the sums after it: to the numbers in the scale, to the gradient in the sums."""
    if log_decay is None:
        return sums, level
    total = log_decay.sum(-1)
    return sums * (total - total.detach()).exp().to(sums.dtype)[..., None, None], (level + total.detach()).to(sums.dtype)


def _plan(
    stretch: Callable[..., Any], x: Tensor, kernel: Kernel, tokens: int, multiple: int = 1
) -> tuple[Callable[..., Any], list[int]]:
    """How long each stretch is, and how it is run: under a checkpoint when there are several and gradients are wanted."""
    per_token = max(1, x.shape[0] * x.shape[1] * kernel.features_for(x.shape[-1]))
    budget = COMPILED_BUDGET if torch.compiler.is_compiling() else BUDGET
    longest = max(multiple, budget // per_token // multiple * multiple)
    whole = tokens - tokens % multiple
    lengths = [longest] * (whole // longest)
    lengths += [n for n in (whole % longest, tokens - whole) if n]
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if len(lengths) > 1 and torch.is_grad_enabled() and not transformed:
        return lambda *args: checkpoint(stretch, *args, use_reentrant=False, preserve_rng_state=False), lengths
    return stretch, lengths


def _pieces(lengths: list[int], *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Splits tensors (B, H, T, D), (B, H, T) and masks (B, T) along the tokens."""
    split: list[Any] = []
    for x in tensors:
        split.append([None] * len(lengths) if x is None else x.split(lengths, -2 if x.dim() == 4 else -1))
    return zip(*split)


def _join(state: Sums) -> Tensor:
    return torch.cat([state.S, state.Z.unsqueeze(-1)], -1)


def _split(state: Sums, sums: Tensor, level: Tensor, tokens: Tensor | int) -> Sums:
    return replace(state, S=sums[..., :-1], Z=sums[..., -1], log_scale=level, tokens=state.tokens + tokens)


def _count(key: Tensor, mask: Tensor | None) -> Tensor | int:
    return key.shape[-2] if mask is None else mask.sum(-1, keepdim=True)

