"""absorb, read and causal on the native code: the same three as the torch engine's, with the same results."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.base import Kernel
from ...sums import finite
from ...sums.state import Sums
from . import calls, given, ops
from .maps import IDENTITY, NativeMap, native_map, prepare


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
    weight = log_input
    if log_decay is not None:  # each key is decayed by what comes after it, the sums by everything
        total = log_decay.sum(-1)
        later = total.unsqueeze(-1) - log_decay.cumsum(-1)
        weight = later if weight is None else weight + later
        S, Z, level = state.S, state.Z, state.log_scale
        change = (total - total.detach()).exp().to(S.dtype)
        level = (level + total.detach()).to(level.dtype)
        state = replace(state, S=S * change[..., None, None], Z=Z * change[..., None], log_scale=level)
    fmap = native_map(kernel, scale, key.shape[-1])
    if fmap.kind == IDENTITY:
        return given.absorb(_apply, fmap, kernel, state, scale, key, value, key_mask, weight)
    fmap, key, weight = _keys(kernel, key, scale, key_mask, weight)
    *sums, guarded = _before(state, key, value, weight)
    S, Z, level, tokens = _apply("absorb", fmap, (key, value.to(key.dtype), *sums, key_mask, weight))
    return Sums(state.kernel, S, Z, level, tokens, torch.zeros_like(tokens) if guarded is None else guarded)


def read(kernel: Kernel, query: Tensor, state: Sums, *, scale: float | None) -> tuple[Tensor, Sums]:
    """What queries (B, Hq, L, D) get from a state: (B, Hq, L, M)."""
    fmap, query = _queries(kernel, query, scale)
    if fmap.kind == IDENTITY:
        return given.read(_apply, fmap, kernel, state, scale, query)
    tensors = query, state.S, state.Z, state.log_scale, state.tokens, state.guarded
    out, guarded = _apply("read", fmap, tensors)
    return out, replace(state, guarded=guarded)


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
    """Queries (B, Hq, T, D) against the state and the keys up to their own; and the state after them."""
    fmap, query = _queries(kernel, query, scale)
    if fmap.kind == IDENTITY:
        pieces = query, key, value, key_mask, log_decay, log_input
        return given.causal(_apply, fmap, kernel, state, scale, *pieces)
    fmap, key, weight = _keys(kernel, key, scale, key_mask, log_input, scaled=log_decay is not None)
    sums = _before(state, query, key, value, log_decay, weight)
    tensors = query, key, value.to(key.dtype), *sums, key_mask, log_decay, weight
    out, S, Z, level, tokens, guarded, _ = _apply("causal", fmap, tensors)
    return out, Sums(state.kernel, S, Z, level, tokens, guarded)


def _queries(kernel: Kernel, query: Tensor, scale: float | None) -> tuple[NativeMap, Tensor]:
    fmap = native_map(kernel, scale, query.shape[-1])
    return fmap, prepare(kernel, query, scale, is_key=False)[0] if fmap.prepared else query


def _keys(
    kernel: Kernel, key: Tensor, scale: float | None, mask: Tensor | None, weight: Tensor | None, scaled: bool = False
) -> tuple[NativeMap, Tensor, Tensor | None]:
    """The map, the keys as it takes them, and the logarithm of what else multiplies each key."""
    fmap = native_map(kernel, scale, key.shape[-1])
    if fmap.prepared:
        if mask is not None:
            key = key.masked_fill(~mask[:, None, :, None], 0)
        key, log_weight = prepare(kernel, key, scale, is_key=True)
        if log_weight is not None:
            weight = log_weight.double() if weight is None else weight + log_weight
    if (scaled or weight is not None) and not fmap.scaled:
        fmap = replace(fmap, scaled=True)
    return fmap, key, weight


def _before(state: Sums, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The sums to go on from; None for each where no token was seen and no gradient is wanted."""
    if state.untouched and not _trained(*tensors):
        return (None,) * 5
    return state.S, state.Z, state.log_scale, state.tokens, state.guarded


def _trained(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _apply(name: str, fmap: NativeMap, tensors: Sequence[Tensor | None]) -> Any:
    """Through torch's dispatcher where a graph or a gradient is wanted, else straight to the library."""
    ints, floats = fmap.numbers()
    arguments: list[Any] = [*tensors, list(fmap.weights), ints, floats]
    train = _trained(*tensors)
    if name == "causal":
        arguments.append(train)
    if torch.compiler.is_compiling():
        return getattr(ops, name)(*arguments)
    try:
        return getattr(ops if train else calls, name)(*arguments)
    except calls.NotFiniteError:
        names = {"absorb": ("key", "value"), "read": ("query",), "causal": ("query", "key", "value")}[name]
        finite.refuse(torch.float32, **{n: x for n, x in zip(names, tensors) if x is not None})
