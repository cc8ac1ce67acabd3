"""Bad input gets a clear error at once: what was given, and what to do."""

import math

import torch
from torch import Tensor

from .kernels.base import is_plain
from .nearfar.state import NearFarState
from .sums import finite
from .sums.state import Cache, State, Sums


def check_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The batch dimensions of the call."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}.")
        if x.dim() < 2:
            raise ValueError(f"{name} must be (..., heads, tokens, dim) or (tokens, dim), got shape {tuple(x.shape)}.")

    def shapes() -> str:
        return ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())

    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}: "
            "cast them first, e.g. key.to(query.dtype)."
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}."
        )
    if not query.dim() == key.dim() == value.dim():
        raise ValueError(f"query, key and value must have the same number of dimensions, got {shapes()}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same dim, got {query.shape[-1]} and {key.shape[-1]} in {shapes()}."
        )
    if query.shape[-1] == 0:
        raise ValueError(f"query and key must have at least one coordinate, got {shapes()}.")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"every key needs a value, got {key.shape[-2]} keys and {value.shape[-2]} values in {shapes()}."
        )
    if query.dim() == 2:
        return ()
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if kv_heads != value.shape[-3]:
        raise ValueError(f"key and value must have the same heads, got {kv_heads} and {value.shape[-3]} in {shapes()}.")
    if heads != kv_heads:
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key heads, got {heads} and {kv_heads}: {heads} query heads can share "
                f"any number of key heads that divides {heads}."
            )
        if not enable_gqa:
            raise ValueError(
                f"query has {heads} heads and key {kv_heads}: pass enable_gqa=True to let groups of query heads share "
                "keys and values."
            )
    batches = query.shape[:-3], key.shape[:-3], value.shape[:-3]
    if batches[0] == batches[1] == batches[2]:
        return tuple(batches[0])
    try:
        return tuple(torch.broadcast_shapes(*batches))
    except RuntimeError:
        raise ValueError(f"the batch dimensions of query, key and value do not fit together: {shapes()}.") from None


def check_mask(key_mask: Tensor, batch: tuple[int, ...], tokens: int) -> None:
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a bool tensor, True = attend, got {kind}: convert with key_mask.bool().")
    try:
        fits = torch.broadcast_shapes(key_mask.shape, (*batch, tokens)) == (*batch, tokens)
    except RuntimeError:
        fits = False
    if not fits or key_mask.dim() < 1 or key_mask.shape[-1] != tokens:
        raise ValueError(
            f"key_mask must be (batch, key tokens) = {(*batch, tokens)}, got {tuple(key_mask.shape)}: "
            "it says which keys may be seen, by every head and every query."
        )


def check_gate(name: str, gate: Tensor, is_causal: bool, shape: tuple[int, ...]) -> None:
    if not is_causal:
        raise ValueError(f"{name} forgets with time, so it needs is_causal=True.")
    if not isinstance(gate, Tensor) or not gate.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor of (batch, kv heads, tokens).")
    try:
        fits = torch.broadcast_shapes(gate.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must be (batch, kv heads, key tokens) = {shape}, got {tuple(gate.shape)}.")
    if is_plain(gate) and gate.numel() and not bool(((gate > 0) & (gate <= 1)).all()):
        raise ValueError(f"{name} must lie in (0, 1]: 1 forgets nothing; the logarithm of 0 has no use here.")


def check_scale(scale: float | None) -> None:
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be a positive number or None, got {scale}.")


def check_state(
    state: State,
    kind: type[State],
    signature: str,
    batch: tuple[int, ...],
    heads: int,
    features: int | None,
    value_dim: int,
) -> None:
    if not isinstance(state, State):
        raise TypeError(f"state must be a linattn.State from return_state=True, got {type(state).__name__}.")
    if not isinstance(state, kind) or state.kernel != signature:
        raise ValueError(f"this state was made by {state.kernel}; it cannot go on with {signature}.")
    if isinstance(state, Sums):
        expected = (*batch, heads, features, value_dim)
        if tuple(state.S.shape) != expected:
            raise ValueError(
                f"this state has S of shape {tuple(state.S.shape)}; the call needs {expected} "
                "(batch, kv heads, features, value dim)."
            )
    elif isinstance(state, Cache):
        got = (*state.value.shape[:-2], state.value.shape[-1])
        if tuple(got) != (*batch, heads, value_dim):
            raise ValueError(
                f"this state has values of shape {tuple(state.value.shape)}; the call has batch {batch}, {heads} kv heads "
                f"and value dim {value_dim}."
            )
    elif isinstance(state, NearFarState):
        got = (*state.near.shape[:-2], state.near.shape[-1] - state.moments.shape[-1] + 1)
        if tuple(got) != (*batch, heads, value_dim):
            raise ValueError(
                f"this state has (batch, kv heads, value dim) {got}; the call has {(*batch, heads, value_dim)}."
            )


def check_finite(out: Tensor, state: State, query: Tensor, key: Tensor, value: Tensor) -> None:
    """NaN or infinity in the result is an error that names its source. It is looked for in the result, not the input:
    one pass over the rows, and masked keys may hold anything."""
    results = [out, *(state.S, state.Z)] if isinstance(state, Sums) else [out]
    if not is_plain(out) or all(math.isfinite(x.detach().sum()) or bool(torch.isfinite(x).all()) for x in results):
        return
    finite.refuse(out.dtype, query=query, key=key, value=value)


def refuse_attn_mask(attn_mask: object) -> None:
    if attn_mask is not None:
        raise ValueError(
            "an arbitrary attn_mask has no linear form: every query would need sums of its own. "
            "Use is_causal=True, key_mask= for padding or cu_seqlens= for packed sequences, or torch's own "
            "scaled_dot_product_attention."
        )
