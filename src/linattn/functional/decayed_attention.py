"""linattn.attention without a denominator, or with a decay for each channel: the rule of decayed sums on kernel features.

S <- exp(log_decay_t) S + phi(k_t) v_t^T;  out_t = phi(q_t)^T S. With `normalize`, the values get a column of ones, whose sum is
the denominator.
"""

import dataclasses
import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import Kernel
from ..kernels.base import compute_dtype
from ..kernels.elementwise import Identity
from ..kernels.names import KernelName, constant
from ..ops.linear_attention.chunk import divide
from ..ops.packing import Packing, read_packing
from ..states import State
from ..states.recurrent import RecurrentState
from . import checks
from .decayed_sums import decayed_state, decayed_sums
from .normalise import Arguments, read_masks
from .recurrent_fast_path import decode as one_token

RULE = "decayed_sums"
UNNORMALIZED = " normalize=False"  # in the names of states


class _Tokens(NamedTuple):
    """phi(q) (..., heads, L, r), phi(k) and values (..., kv heads, S, .), what multiplies the output, log_decay (.., kv heads,
    S) or (.., kv heads, S, r), and the mask (..., S)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    log_decay: Tensor | None
    mask: Tensor | None


def serves(arguments: Arguments) -> bool:
    """Whether the call belongs here: kernels whose features come with log-weights have a form of their own."""
    if arguments.normalize and not per_channel(arguments):
        return False
    if not isinstance(arguments.query, Tensor) or arguments.query.dim() < 2:
        return False
    kernel = constant(arguments.kernel, arguments.query)
    if not kernel.has_features:
        return False
    if not kernel.log_weighted:
        return True
    if per_channel(arguments):
        raise ValueError(
            f"log_decay for each channel multiplies features of moderate size, and those of {type(kernel).__name__} come with "
            'log-weights: pass log_decay for each head, or kernel="identity", "elu" or "relu".'
        )
    return False


def per_channel(arguments: Arguments) -> bool:
    """Whether log_decay is (..., kv heads, S, features); for tokens without heads (S, features)."""
    x = arguments.log_decay
    if not isinstance(x, Tensor) or not isinstance(arguments.query, Tensor) or arguments.query.dim() < 2:
        return False
    if arguments.query.dim() > 2:
        return x.dim() == arguments.query.dim()
    tokens = arguments.key.shape[-2] if isinstance(arguments.key, Tensor) and arguments.key.dim() == 2 else 0
    # (1, features) of one token is not (1 head, 1 token) if there are several features.
    return x.dim() == 2 and x.shape[0] == tokens and (tokens > 1 or x.shape[1] > 1)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | KernelName,
    scale: float | None,
    enable_gqa: bool,
    normalize: bool,
    log_decay: Tensor | None,
    state: RecurrentState,
    donate: bool,
) -> tuple[Tensor, State] | None:
    """One token of the identity kernel without a denominator; None if the call is not eligible."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)) or query.dim() != 4:
        return None
    if normalize or (kernel != "identity" and type(kernel) is not Identity) or key.shape[:3] != value.shape[:3]:
        return None
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        return None
    made = constant(kernel, query)
    if not (made.any_dim or made.dim == query.shape[-1]):
        return None
    rule = made.signature(scale, query.shape[-1]) + UNNORMALIZED
    factor = 1.0 if scale is None else float(scale)
    return one_token(rule, (query, key, value, None, log_decay), (factor, False, enable_gqa), state, donate)


def attend(arguments: Arguments) -> Tensor | tuple[Tensor, State]:
    """The output, and the state with return_state. Autocast is disabled inside: it would narrow the features and sums."""
    device = arguments.query.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        return _attend(arguments)


def _attend(arguments: Arguments) -> Tensor | tuple[Tensor, State]:
    query, key, value = arguments.query, arguments.key, arguments.value
    batch = checks.check_inputs(query, key, value, arguments.enable_gqa)
    checks.check_dropout(arguments.dropout_p)
    kernel = constant(arguments.kernel, query)
    kernel.check_dim(query.shape[-1])
    flat, S = query.dim() == 2, key.shape[-2]
    if flat:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    mask = read_masks(arguments, batch, not flat, S)
    mask = None if mask is None else mask.reshape(*batch, S)
    if mask is not None:  # a masked token counts nothing, even if it holds NaN
        hidden = ~mask[..., None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    log_decay, value = _read_decay(arguments, kernel, batch, key, value)
    if arguments.normalize:
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    signature = kernel.signature(arguments.scale, query.shape[-1]) + ("" if arguments.normalize else UNNORMALIZED)
    state = _renamed(arguments.state, signature, RULE)
    tokens = _Tokens(*_features(kernel, query, key, value, arguments.scale), log_decay, mask)
    packing = None if arguments.cu_seqlens is None else read_packing(arguments.cu_seqlens, query.shape[-2], S)
    if packing is not None and not (arguments.is_causal and packing[0].bounds == packing[1].bounds):
        out, new = _padded(arguments, tokens, packing, state, batch)
    elif arguments.is_causal:
        out, new = _causal(arguments, tokens, state, None if packing is None else list(packing[1].bounds))
    else:
        out, new = _full(tokens, state, batch)
        checks.check_finite(out, None, state, arguments.query, arguments.key, arguments.value)
    if arguments.normalize:
        out = divide(out.to(compute_dtype(out.dtype)))[0]
    out = out.to(arguments.query.dtype)
    out = out.squeeze(-3) if flat else out
    return (out, dataclasses.replace(new, kernel=signature)) if arguments.return_state else out


def _features(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """phi(q), phi(k), values of their dtype, and what multiplies the output: the identity needs no features of its own."""
    if isinstance(kernel, Identity):
        return query, key, value, 1.0 if scale is None else float(scale)
    phi_q, phi_k = kernel.query_features(query, scale=scale), kernel.key_features(key, scale=scale)
    return phi_q, phi_k, value.to(phi_k.dtype), 1.0


def _read_decay(
    arguments: Arguments, kernel: Kernel, batch: tuple[int, ...], key: Tensor, value: Tensor
) -> tuple[Tensor | None, Tensor]:
    """log_decay (..., kv heads, S) or (..., kv heads, S, features), and the values; a gate g lets in 1 - g of them."""
    log_decay, gate = arguments.log_decay, arguments.gate
    if log_decay is None and gate is None:
        return None, value
    if log_decay is not None and gate is not None:
        raise ValueError("log_decay and gate are two forms of the same thing: pass one.")
    shape = (*batch, key.shape[-3], key.shape[-2])
    if gate is not None:
        checks.check_forgetting("gate", gate, arguments.is_causal, shape)
        gate = gate.expand(shape)
        return gate.log(), value * (1 - gate).unsqueeze(-1).to(value.dtype)
    assert log_decay is not None
    if per_channel(arguments):
        shape = (*shape, kernel.features_of(key))
        log_decay = log_decay.unsqueeze(0) if arguments.query.dim() == 2 else log_decay
    checks.check_forgetting("log_decay", log_decay, arguments.is_causal, shape)
    return log_decay.expand(shape), value


def _renamed(state: State | None, old: str, new: str) -> State | None:
    """The state under the name that the rule knows it by."""
    if state is None:
        return None
    if not isinstance(state, RecurrentState) or state.kernel != old:
        made_by = state.kernel if isinstance(state, State) else type(state).__name__
        raise ValueError(f"this state was made by {made_by}; it cannot go on with {old}.")
    return dataclasses.replace(state, kernel=new)


def _padded(
    arguments: Arguments, tokens: _Tokens, packing: tuple[Packing, Packing], state: State | None, batch: tuple[int, ...]
) -> tuple[Tensor, RecurrentState]:
    """Sequences of a packed tensor as rows of a padded batch."""
    queries, keys = packing
    entries, count = math.prod(batch), queries.count
    flat = [x.expand(*batch, *x.shape[-3:]).reshape(entries, *x.shape[-3:]) for x in tokens[:3]]
    valid = keys.valid(entries, flat[1].device)
    mask = valid
    if tokens.mask is not None:
        length = tokens.mask.shape[-1]
        mask = valid & keys.pad(tokens.mask.expand(*batch, length).reshape(entries, length), token_dim=1)
    decay = tokens.log_decay
    if decay is not None:
        decay = keys.pad(decay.reshape(entries, *decay.shape[len(batch) :]), token_dim=2)
        hidden = ~valid.unsqueeze(1)
        decay = decay.masked_fill(hidden.unsqueeze(-1) if decay.dim() == 4 else hidden, 0)
    query = queries.pad(flat[0], token_dim=2)
    key, value = (keys.pad(x, token_dim=2) for x in flat[1:])
    padded = _Tokens(query, key, value, tokens.scale, decay, mask)
    if isinstance(state, RecurrentState):
        state = state.map(lambda _, x: x.reshape((entries * count, *x.shape[len(batch) + 1 :])))
    if arguments.is_causal:
        out, new = _causal(arguments, padded, state, None)
    else:
        out, new = _full(padded, state, (entries * count,))
        checks.check_finite(out, None, state, arguments.query, arguments.key, arguments.value)
    out = queries.unpad(out, entries, token_dim=2)
    new = new.map(lambda _, x: x.reshape((*batch, count, *x.shape[1:])))
    return out.reshape(*batch, *out.shape[1:]), new


def _causal(
    arguments: Arguments, tokens: _Tokens, state: State | None, bounds: list[int] | None
) -> tuple[Tensor, RecurrentState]:
    """Bottom-right where queries and keys differ in number: zeros in front make them the same tokens."""
    query, key, value, scale, log_decay, mask = tokens
    L, S = query.shape[-2], key.shape[-2]
    if L == 0 and bounds is None:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        key, value = (x.expand(*batch, *x.shape[-3:]) for x in (key, value))
        new = decayed_state(key, value, log_decay=log_decay, key_mask=mask, state=state)
        return query.new_zeros(*batch, query.shape[-3], 0, value.shape[-1]), new
    pad = torch.nn.functional.pad
    if L < S:
        query = pad(query, (0, 0, S - L, 0))
    elif L > S:
        key, value = (pad(x, (0, 0, L - S, 0)) for x in (key, value))
        mask = pad(key.new_ones(S, dtype=torch.bool) if mask is None else mask, (L - S, 0))
        if log_decay is not None:
            log_decay = pad(log_decay, (0, 0, L - S, 0) if log_decay.dim() == key.dim() else (L - S, 0))
    out, new = decayed_sums(
        query,
        key,
        value,
        log_decay=log_decay,
        scale=scale,
        key_mask=mask,
        enable_gqa=True,
        cu_seqlens=bounds,
        state=state,
        engine=arguments.engine,
    )
    return out[..., S - L :, :] if L < S else out, new


def _full(tokens: _Tokens, state: State | None, batch: tuple[int, ...]) -> tuple[Tensor, RecurrentState]:
    """Every query sees every key: two matrix products."""
    query, key, value, scale, _, mask = tokens
    dtype = compute_dtype(query.dtype)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    seen = torch.full((*batch, key.shape[-3]), key.shape[-2], dtype=torch.int64, device=key.device)
    if mask is not None:
        hidden = ~mask[..., None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        seen = mask.sum(-1, keepdim=True).expand_as(seen).clone()
    S = (key.mT @ value).expand(*batch, key.shape[-3], key.shape[-1], value.shape[-1])
    if isinstance(state, RecurrentState):
        if state.S.shape != S.shape:
            raise ValueError(f"this state has S of shape {tuple(state.S.shape)}; the call needs {tuple(S.shape)}.")
        S, seen = S + state.S.to(dtype), seen + state.tokens
    groups = query.shape[-3] // key.shape[-3]
    out = scale * (query @ (S.repeat_interleave(groups, -3) if groups > 1 else S))
    return out, RecurrentState(RULE, S.contiguous(), seen)
