"""Argument checks that the update rules share."""

import math

import torch
from torch import Tensor

from ..kernels.base import compute_dtype, is_plain
from ..ops.decayed_sums.call import DecayedSumsCall
from ..ops.delta_rule.call import DeltaRuleCall
from ..ops.run import hide
from ..states.recurrent import RecurrentState
from .checks import check_tokens

LOWEST = -1e4  # exp of it is 0 in float32 and float64: clamping changes nothing


def check_same_tokens(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Types, devices, dims, and one number of tokens."""
    check_tokens(query, key, value)
    if not query.shape[-2] == key.shape[-2] == value.shape[-2]:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"query, key and value must have the same number of tokens, got {shapes}.")


def check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Head counts; returns the batch dimensions, broadcast. Tensors have at least a head dimension."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    Hq, Hk, H = query.shape[-3], key.shape[-3], value.shape[-3]
    if 0 in (Hq, Hk, H):
        raise ValueError(f"query, key and value must have at least one head, got {shapes}.")
    if not Hq == Hk == H:
        if not enable_gqa:
            raise ValueError(
                f"query, key and value have {Hq}, {Hk} and {H} heads: pass enable_gqa=True to share heads."
            )
        if H % Hk:
            raise ValueError(f"value heads must be a multiple of key heads, got {H} and {Hk} in {shapes}.")
        if H % Hq and Hq % H:
            raise ValueError(
                f"query heads must divide value heads or be a multiple of them, got {Hq} and {H} in {shapes}."
            )
    try:
        return tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        raise ValueError(f"the batch dimensions of query, key and value do not fit together: {shapes}.") from None


def read_gate(name: str, gate: Tensor, batch: tuple[int, ...], sizes: tuple[int, ...], like: Tensor) -> Tensor:
    """beta or log_decay as (B, heads, T) or (B, heads, T, dim), in the dtype that the rule computes in."""
    shape, words = (
        (*batch, *sizes),
        "(..., value heads, tokens, dim)" if len(sizes) == 3 else "(..., value heads, tokens)",
    )
    if not isinstance(gate, Tensor) or not gate.is_floating_point():
        got = gate.dtype if isinstance(gate, Tensor) else type(gate).__name__
        raise TypeError(f"{name} must be a floating-point tensor {words}, got {got}.")
    try:
        fits = tuple(torch.broadcast_shapes(gate.shape, shape)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must be {words} = {shape}, got {tuple(gate.shape)}.")
    if gate.device != like.device:
        raise ValueError(f"{name} is on {gate.device}, query is on {like.device}: move it there.")
    gate = gate.resolve_neg().to(compute_dtype(like.dtype))
    gate = gate if tuple(gate.shape) == shape else gate.expand(shape)
    return gate if len(batch) == 1 else gate.reshape(math.prod(batch), *sizes)


def read_log_decay(log_decay: Tensor, batch: tuple[int, ...], value: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """(B, H, T) or (B, H, T, D), not above 0."""
    H, T = value.shape[-3:-1]
    per_channel = isinstance(log_decay, Tensor) and log_decay.dim() == len(batch) + 3
    gate = read_gate("log_decay", log_decay, batch, (H, T, dim) if per_channel else (H, T), value)
    if is_plain(gate) and gate.numel():
        seen = gate.detach() if mask is None else hide(mask.unsqueeze(1), gate.detach())
        if not bool((seen <= 0).all()):
            raise ValueError(
                "log_decay must not be NaN or above 0: it is the logarithm of what multiplies the state, 0 forgets nothing."
            )
    return gate.clamp(min=LOWEST)


def read_mask(key_mask: Tensor | None, batch: tuple[int, ...], tokens: int, device: torch.device) -> Tensor | None:
    """(B, T)."""
    if key_mask is None:
        return None
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        got = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a bool tensor (batch, tokens), True = use the token, got {got}.")
    shape = (*batch, tokens)
    try:
        fits = tuple(torch.broadcast_shapes(key_mask.shape, shape)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"key_mask must be (batch, tokens) = {shape}, got {tuple(key_mask.shape)}.")
    if key_mask.device != device:
        raise ValueError(f"key_mask is on {key_mask.device}, query is on {device}: move it there.")
    return key_mask.expand(shape).reshape(math.prod(batch), tokens)


def read_state(state: object, rule: str, batch: tuple[int, ...], query: Tensor, value: Tensor) -> Tensor:
    """S of a state that fits the call, (B * n, H, D, M)."""
    if not isinstance(state, RecurrentState) or state.kernel != rule:
        made = f"by {state.kernel}" if isinstance(state, RecurrentState) else f"a {type(state).__name__}"
        raise (ValueError if isinstance(state, RecurrentState) else TypeError)(
            f"state must come from an earlier call of {rule} with return_state=True, got one made {made}."
        )
    found, sizes = state.validate()
    got = (*found, sizes["H"], sizes["D"], sizes["M"])
    expected = (*batch, value.shape[-3], query.shape[-1], value.shape[-1])
    if got != expected:
        raise ValueError(f"this state has S of shape {got}; the call needs {expected} (batch, heads, dim, value dim).")
    if state.device != query.device:
        raise ValueError(
            f"this state is on {state.device}, query is on {query.device}: move it with state.to(query.device)."
        )
    S = state.cast(compute_dtype(query.dtype)).S
    return S.reshape(math.prod(batch), *S.shape[len(batch) :])


def check_finite(out: Tensor, call: DeltaRuleCall | DecayedSumsCall) -> None:
    """NaN or infinity in the result is an error that names its source. Masked tokens may hold anything.

    Every state is read by the last row of its sequence, so that the rows show what the states hold.
    """
    if not is_plain(out) or math.isfinite(out.detach().sum()) or bool(torch.isfinite(out).all()):
        return
    guilty = []
    for name, x in call._asdict().items():
        if not isinstance(x, Tensor) or name == "mask":
            continue
        if call.mask is not None and name not in ("query", "state"):
            x = hide(call.mask.unsqueeze(1), x)
        if not bool(torch.isfinite(x).all()):
            guilty.append("the state's S" if name == "state" else name)
    if guilty:
        raise ValueError(
            f"{' and '.join(guilty)} must be finite, but hold NaN or infinity: the state would spread them."
        )
    raise ValueError(
        f"the state left the range of {out.dtype}: with the delta rule it grows without bound where beta times the squared "
        "norm of a key exceeds 2 (pass normalize_qk=True); otherwise scale the inputs down or pass float64."
    )
