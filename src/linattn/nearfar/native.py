"""Near/far attention by the native engine: CPUs; with gradients where it is causal, without recall.

Keys are merged at the same absolute positions as in the torch engine and by the same rule, so a state may go from one engine
to the other. Where two costs agree to the last bits, the engines may merge different pairs.
"""

from __future__ import annotations  # `native.nearfar` exists only where the library does

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..engines.call import Call
from ..states.base import pack_of
from . import attention, autograd, native_bidirectional
from .attention import few_queries, in_head_order, kernel_of
from .autograd import advance_with_gradients
from .bindings import Inputs, PackedState, advance
from .block_attention import attend_state
from .entry_codes import NO_GRADIENT
from .kernel import NearFar
from .merge import query_moments
from .native_form import NativeForm, far_enough
from .native_merge import merge
from .positions import Positions
from .state import NearFarState

STATISTICS = ("received", "near_received", "moments", "queries")  # fields of a state without gradients
Step = Callable[[Inputs, PackedState], tuple[Tensor | None, PackedState]]


def refusal(call: Call, query: Tensor, key: Tensor, value: Tensor, state: NearFarState | None) -> str | None:
    """Why near/far attention has no native form for this call, or None. What holds for all kernels is checked elsewhere."""
    kernel = kernel_of(call)
    reason = kernel_refusal(kernel)
    if reason is not None:
        return reason
    if torch.compiler.is_compiling():
        return _compile_refusal(call, query, key, state)
    if _trained(kernel, query, key, value, state):
        if not call.is_causal or kernel.recall:
            return "near/far attention with recall or without is_causal is trained through torch's own operators"
        if state is not None and any(_wants_gradient(getattr(state, name)) for name in STATISTICS):
            return "the statistics of this state want gradients, which only torch's own operators pass on"
    if state is not None and kernel.position_bias is not None:
        pack: PackedState | None = pack_of(state)
        positions = state.positions if pack is None else pack.positions
        if not far_enough(positions, kernel.sinks, kernel.reach):
            return "tokens were dropped from this state, so that slots are nearer than position_bias reaches"
    return None


def _compile_refusal(call: Call, query: Tensor, key: Tensor, state: NearFarState | None) -> str | None:
    """Why a call inside torch.compile is not one node of its graph, or None."""
    if kernel_of(call).recall:
        return "torch.compile needs torch's own operators for near/far attention with recall"
    if not call.is_causal or query.shape[2] != key.shape[2]:
        return (
            "torch.compile needs torch's own operators for near/far attention that is not causal over the same tokens"
        )
    if state is not None or (call.return_state and call.key_mask is not None):
        return "torch.compile cannot read the positions of a near/far state, on which shapes depend"
    return None


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _trained(kernel: NearFar, query: Tensor, key: Tensor, value: Tensor, state: NearFarState | None) -> bool:
    """Whether a call has gradients. A state that is still packed has none."""
    held = () if state is None or pack_of(state) is not None else state.tensors().values()
    return _wants_gradient(query, key, value, kernel.bias_table(), *held)


def kernel_refusal(kernel: NearFar) -> str | None:
    """Why a kernel has no native form, or None. The library gives all slots the last bias of a table, so none may be near."""
    if kernel.reach > kernel.window + 1:
        return f"position_bias reaches {kernel.reach} tokens back, farther than the window of {kernel.window}"
    return None


def attend(
    call: Call, query: Tensor, key: Tensor, value: Tensor, state: NearFarState | None
) -> tuple[Tensor, NearFarState | None]:
    """As `attention.attend`. Torch's own softmax serves where no key has to be merged."""
    kernel, (B, H, S, D) = kernel_of(call), key.shape
    if torch.compiler.is_compiling():
        return _compiled(call, query, key, value)
    form = NativeForm.of(kernel, call.scale, H, D)
    trained = _trained(kernel, query, key, value, state)
    step: Step = advance
    if kernel.state_bits == 8 and call.return_state and _wants_gradient(key, value):
        raise ValueError(NO_GRADIENT)
    if trained:
        form, step = form.with_gradients(kernel), advance_with_gradients
    before = NearFarState.empty(kernel, call.signature, query, key, value) if state is None else state
    packed = PackedState.of(before, form)
    counts: list[int] = [S] * B if call.key_mask is None else call.key_mask.sum(-1).tolist()
    budget, positions = min(form.budgets, default=0), packed.positions
    if call.is_causal:
        few = not call.return_state and few_queries(kernel, budget, positions, query.shape[2], S)
        by_torch = few or positions.all_exact(kernel, budget, counts)
    else:
        by_torch = state is None
    out: Tensor | None = None
    if by_torch:
        out = None if call.is_causal else _bidirectional(call, query, key, value, counts)
        if out is None:
            out, _ = attention.attend(replace(call, return_state=False), query, key, value, state, merge=merge)
        if not call.return_state:
            return out, None
    inputs = Inputs(form, query, key, value, call.key_mask, counts, attend=out is None)
    if call.is_causal:
        native_out, packed = prefill(kernel, inputs, query, packed, step)
    else:
        packed = absorb(inputs, query, packed)
        native_out = _read(kernel, form.sqrt_scale, query, packed) if out is None else None
    out = native_out if out is None else out
    assert out is not None
    if not call.return_state:
        return out, None
    if max(counts, default=0) and not trained:
        return out, NearFarState.packed(call.signature, packed)
    return out, NearFarState(call.signature, **packed.tensors())  # not packed: tensors of others, or with gradients


def _compiled(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, NearFarState | None]:
    """`attend` inside torch.compile: one operator; torch's own softmax where it is known that no key has to be merged."""
    kernel, (B, H, L, D) = kernel_of(call), key.shape
    form = NativeForm.of(kernel, call.scale, H, D).with_gradients(kernel)
    exact = form.window + form.sinks + min(form.budgets, default=0) >= L
    if exact and call.key_mask is None and not call.return_state:
        return attention.attend(call, query, key, value, None)
    inputs = Inputs(form, query, key, value, call.key_mask, [], True)
    out, *fields = autograd.run(inputs, [], autograd.FIRST, attend=True, keep=call.return_state)
    if not call.return_state:
        return out, None
    places = Positions.start(B).after(form, [L] * B)
    tensors = dict(zip(autograd.FIELDS, fields, strict=True))
    tokens, merged, entered = (torch.tensor(n, dtype=torch.int64) for n in places)
    return out, NearFarState(call.signature, tokens=tokens, merged=merged, entered=entered, **tensors)


def prefill(
    kernel: NearFar, inputs: Inputs, query: Tensor, state: PackedState, step: Step = advance
) -> tuple[Tensor | None, PackedState]:
    """Queries (B, Hq, L, D) at the last of the keys (B, H, S, .): rows if they attend, and the state after the keys."""
    L, S = query.shape[2], inputs.key.shape[2]
    if S > L:
        _, state = step(_cut(inputs, None, 0, S - L), state)
    early = _read(kernel, inputs.form.sqrt_scale, query[:, :, : L - S], state) if L > S and inputs.attend else None
    rows, state = step(_cut(inputs, query[:, :, max(0, L - S) :], max(0, S - L), S), state)
    return rows if early is None or rows is None else torch.cat([early, rows], 2), state


def _bidirectional(call: Call, query: Tensor, key: Tensor, value: Tensor, counts: list[int]) -> Tensor | None:
    """Attention without is_causal and without a state before it; None if torch's own operators have to serve it."""
    if key.numel() == 0:
        return None
    count = max(counts)
    plan = native_bidirectional.make_plan(kernel_of(call), call.scale, query, key, value, count)
    return None if plan is None else native_bidirectional.attend(plan, query, key, value, call.key_mask)


def absorb(inputs: Inputs, query: Tensor, state: PackedState) -> PackedState:
    """Updates the state from keys; the queries have no positions among them and only supply statistics."""
    B, heads, L, D = query.shape
    H = inputs.key.shape[1]
    x = (query.detach().float() * inputs.form.sqrt_scale).reshape(B, H, heads // max(1, H) * L, D)
    x = torch.nn.functional.pad(x, (0, 1), value=1.0)
    state = replace(state, moments=state.moments + query_moments(x))
    return advance(inputs._replace(query=None, attend=False), state)[1]


def _read(kernel: NearFar, sqrt_scale: float, query: Tensor, state: PackedState) -> Tensor:
    """Attention of queries (B, Hq, L, D) to all keys of a state: (B, Hq, L, M)."""
    B, heads, L, D = query.shape
    groups = NearFarState(state.signature, **state.tensors()).head_groups(kernel, state.positions)
    H = state.near.shape[1]
    x = (query.float() * sqrt_scale).reshape(B, H, heads // max(1, H), L, D)
    outs = [attend_state(group, x if len(groups) == 1 else x[:, group.heads]) for group in groups]
    return in_head_order(outs, groups).flatten(1, 2)


def _cut(inputs: Inputs, query: Tensor | None, start: int, end: int) -> Inputs:
    """Some of the keys, with these queries."""
    if start == 0 and end == inputs.key.shape[2]:
        return inputs._replace(query=query)
    key, value = inputs.key[:, :, start:end], inputs.value[:, :, start:end]
    mask = None if inputs.mask is None else inputs.mask[:, start:end]
    counts: list[int] = [end - start] * key.shape[0] if mask is None else mask.sum(-1).tolist()
    return Inputs(inputs.form, query, key, value, mask, counts, inputs.attend and query is not None)
