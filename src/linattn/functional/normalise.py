"""From the arguments of linattn.attention to one checked Call on tensors with one batch dimension, and back."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engines.call import Call, EngineName
from ..kernels import Kernel, KernelName, Softmax
from ..kernels.names import constant
from ..nearfar import NearFar, NearFarState, positioned
from ..ops.linear_attention.decay import Forgetting, forgetting
from ..ops.packing import CuSeqlens, Packing, read_packing
from ..states import KeyValueCache, LinearState, State
from . import checks


@dataclass(frozen=True)
class Arguments:
    """The arguments of linattn.attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    kernel: Kernel | KernelName
    scale: float | None
    key_mask: Tensor | None
    enable_gqa: bool
    normalize: bool
    log_decay: Tensor | None
    gate: Tensor | None
    cu_seqlens: CuSeqlens | None
    state: State | None
    return_state: bool
    engine: EngineName


@dataclass(frozen=True)
class Layout:
    """What `restore` undoes. batch, dtype: of the call; state_batch: of its state; flat: the tokens had no heads."""

    batch: tuple[int, ...]
    state_batch: tuple[int, ...]
    flat: bool
    return_state: bool
    dtype: torch.dtype


Tokens = tuple[Tensor, Tensor, Tensor, State | None]  # query, key, value and the state before them


def normalise(arguments: Arguments) -> tuple[Call, Tokens, Layout]:
    """Checks and canonicalises all arguments; later stages use only the result."""
    query, key, value = arguments.query, arguments.key, arguments.value
    batch = checks.check_inputs(query, key, value, arguments.enable_gqa)
    checks.check_dropout(arguments.dropout_p)
    flat = query.dim() == 2
    if flat:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    query, key, value = (x.resolve_neg() for x in (query, key, value))
    kernel = constant(arguments.kernel, query)
    kernel.check_dim(query.shape[-1])
    S = key.shape[-2]
    mask = read_masks(arguments, batch, not flat, S)
    forget = _read_forgetting(arguments, kernel, mask, (*batch, key.shape[-3], S))
    packing = None if arguments.cu_seqlens is None else read_packing(arguments.cu_seqlens, query.shape[-2], S)
    state_batch = batch if packing is None else (*batch, packing[0].count)
    entries, scale = math.prod(batch), arguments.scale
    query, key, value = (_one_batch(x, batch, entries) for x in (query, key, value))
    if isinstance(kernel, NearFar) and kernel.positions:
        (query, key, value), scale = _with_positions(arguments, kernel, (query, key, value), mask, packing)
    signature = kernel.signature(scale, query.shape[-1])
    state = arguments.state
    if state is not None:
        state = _read_state(state, kernel, signature, state_batch, (query, key, value))
    call = Call(
        kernel=kernel,
        scale=scale,
        signature=signature,
        is_causal=arguments.is_causal,
        normalize=arguments.normalize,
        return_state=arguments.return_state,
        engine=arguments.engine,
        key_mask=mask,
        log_decay=forget.log_decay,
        log_input=forget.log_input,
        writes=forget.writes,
        packing=packing,
    )
    return (
        call,
        (query, key, value, state),
        Layout(batch, state_batch, flat, arguments.return_state, arguments.query.dtype),
    )


def restore(out: Tensor, new_state: State | None, state: State | None, layout: Layout) -> Tensor | tuple[Tensor, State]:
    """The output (B, heads, L, M) and the state in the caller's layout."""
    batch = layout.batch
    out = out.reshape(*batch, *out.shape[1:]) if len(batch) != 1 else out
    out = (out.squeeze(-3) if layout.flat else out).to(layout.dtype)
    if not layout.return_state:
        return out
    assert new_state is not None
    if len(layout.state_batch) == 1:
        return out, copy.copy(new_state) if new_state is state else new_state
    return out, new_state.map(lambda _, x: x.reshape((*layout.state_batch, *x.shape[1:])))


def _with_positions(
    arguments: Arguments,
    kernel: NearFar,
    tokens: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    packing: tuple[Packing, Packing] | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """Queries and keys with the positions that the biases of near/far need, and the scale of the call."""
    (B, _, L, _), S = tokens[0].shape, tokens[1].shape[2]
    stateful = arguments.state is not None or arguments.return_state
    positioned.check_call(kernel, L, S, is_causal=arguments.is_causal, state=stateful)
    if packing is not None and kernel.position_bias is not None and packing[0].bounds != packing[1].bounds:
        raise ValueError("position_bias over packed sequences needs the same cu_seqlens for queries and keys.")
    start, sequences = None, B * (1 if packing is None else packing[1].count)
    if (
        isinstance(arguments.state, NearFarState) and arguments.state.tokens.numel() == sequences
    ):  # others are refused later on
        start = arguments.state.tokens.to(tokens[1].device)
    place = positioned.key_positions((B, S), mask, None if packing is None else packing[1], start, tokens[1].device)
    return positioned.with_positions(kernel, tokens, arguments.scale, place)


def _one_batch(x: Tensor, batch: tuple[int, ...], entries: int) -> Tensor:
    """(entries, heads, tokens, dim)."""
    if len(batch) == 1 and x.shape[0] == entries:
        return x
    return x.expand(*batch, *x.shape[-3:]).reshape(entries, *x.shape[-3:])


def read_masks(arguments: Arguments, batch: tuple[int, ...], has_heads: bool, tokens: int) -> Tensor | None:
    """Both masks as one of (B, S)."""
    found = []
    if arguments.attn_mask is not None:
        found.append(checks.check_attn_mask(arguments.attn_mask, batch, has_heads, tokens))
        checks.check_device("attn_mask", arguments.attn_mask, arguments.query)
    if arguments.key_mask is not None:
        checks.check_mask(arguments.key_mask, batch, tokens)
        checks.check_device("key_mask", arguments.key_mask, arguments.query)
        found.append(arguments.key_mask)
    if not found:
        return None
    mask = found[0] if len(found) == 1 else found[0] & found[1]
    return mask.expand(*batch, tokens).reshape(math.prod(batch), tokens)


def _read_forgetting(arguments: Arguments, kernel: Kernel, mask: Tensor | None, shape: tuple[int, ...]) -> Forgetting:
    """log_decay or gate as (B, kv heads, S)."""
    checks.check_sums(kernel, arguments.normalize, arguments.log_decay is not None or arguments.gate is not None)
    if arguments.log_decay is None and arguments.gate is None:
        return Forgetting()
    if arguments.log_decay is not None and arguments.gate is not None:
        raise ValueError("log_decay and gate are two forms of the same thing: pass one.")
    for name, x in (("log_decay", arguments.log_decay), ("gate", arguments.gate)):
        if x is not None:
            checks.check_forgetting(name, x, arguments.is_causal, shape)
            checks.check_device(name, x, arguments.query)
    log_decay, gate = (
        None if x is None else x.resolve_neg().expand(shape).reshape(math.prod(shape[:-2]), *shape[-2:])
        for x in (arguments.log_decay, arguments.gate)
    )
    return forgetting(log_decay, gate, mask)


def _read_state(
    state: State, kernel: Kernel, signature: str, batch: tuple[int, ...], tokens: tuple[Tensor, Tensor, Tensor]
) -> State:
    """A state that fits the call, with one batch dimension."""
    kind = (
        KeyValueCache if isinstance(kernel, Softmax) else NearFarState if isinstance(kernel, NearFar) else LinearState
    )
    state = checks.check_state(state, kind, signature, batch, kernel, *tokens)
    if len(batch) == 1:
        return state
    return state.map(lambda _, x: x.reshape((math.prod(batch), *x.shape[len(batch) :])))
