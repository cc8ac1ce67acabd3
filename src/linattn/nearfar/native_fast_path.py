"""Fast path of the native engine: calls without masks, with little Python around them.

What calls of one kernel and shape have in common is worked out once and kept as a plan. For a call that is not eligible the
result is None: `linattn.attention` then checks it argument by argument.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines import native
from ..engines.native.plans import eligible
from ..states.base import State, pack_of
from . import native_bidirectional
from .bindings import Inputs, NearBuffer, PackedState, PreparedDecode, advance
from .entry_codes import stored_width
from .far_cache import FarCache
from .kernel import NearFar
from .native import kernel_refusal
from .native_form import NativeForm, far_enough
from .positioned import one_token, plain_positions, with_positions
from .positions import Growth
from .state import ENTRIES, NearFarState
from .validate import check_kernel

MOST_PLANS = 512  # that are kept for a kernel
Key = tuple[object, ...]  # of a plan
Tokens = tuple[Tensor, Tensor, Tensor]  # query (B, Hq, L, D), key (B, H, L, D), value (B, H, L, M)


class Plan(NamedTuple):
    """All causal calls of one kernel, scale and shape.

    Attributes:
        counts: the new tokens of each sequence.
        sizes: of their states, as `_sizes` has them.
        empty: the state before the first token.
        first: where a call from there ends; None if no key has to be merged until then.
    """

    signature: str
    form: NativeForm
    counts: list[int]
    sizes: tuple[int, ...]
    empty: PackedState
    first: Growth | None


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: NearFar,
    scale: float | None,
    gqa: bool,
    state: State | None,
    return_state: bool,
) -> Tensor | tuple[Tensor, NearFarState] | None:
    """As linattn.attention with is_causal; None if the call is not eligible, or has no key to merge yet."""
    if not (isinstance(key, Tensor) and isinstance(value, Tensor) and eligible(query, key, value)):
        return None
    serve = _with_positions if kernel.positions else _served
    found = serve(query, key, value, kernel, scale, state, gqa)
    if found is None:
        return None
    out, after = found
    return (out, NearFarState.packed(after.signature, after)) if return_state else out


def bidirectional(
    query: Tensor, key: Tensor, value: Tensor, kernel: NearFar, scale: float | None, gqa: bool
) -> Tensor | None:
    """The same without is_causal and without a state."""
    if not (isinstance(key, Tensor) and isinstance(value, Tensor) and eligible(query, key, value)):
        return None
    about = "bidirectional", *_about(kernel, scale, gqa, query, key, value)
    plan = kernel.native_plans.get(about, False)
    if plan is False:
        fits = _fits(kernel, scale, gqa, query, key, value)
        made = native_bidirectional.make_plan(kernel, scale, query, key, value, key.shape[2]) if fits else None
        plan = _keep(kernel, about, made)
    if not isinstance(plan, native_bidirectional.Plan):
        return None
    out = native_bidirectional.attend(plan, query, key, value)
    return out if query.dtype is torch.float32 else out.to(query.dtype)


def _with_positions(
    query: Tensor, key: Tensor, value: Tensor, kernel: NearFar, scale: float | None, state: State | None, gqa: bool
) -> tuple[Tensor, PackedState] | None:
    """`_served` of a kernel with position biases, in float32: positions do not fit into half precision."""
    if not query.dtype == key.dtype == value.dtype:
        return None
    shapes = query.dim(), key.dim(), value.dim()
    if shapes != (4, 4, 4) or query.shape[2] > key.shape[2]:
        return None
    table = kernel.bias_table()
    heads = table if kernel.alibi_slopes is None else kernel.alibi_slopes
    if heads is None or query.shape[1] != heads.shape[0] or (torch.is_grad_enabled() and heads.requires_grad):
        return None
    if state is None:
        seen = [0] * key.shape[0]
    elif not isinstance(state, NearFarState) or (
        pack_of(state) is None and not state.tokens.shape == state.merged.shape == key.shape[:1]
    ):
        return None
    else:
        pack: PackedState | None = pack_of(state)
        positions = state.positions if pack is None else pack.positions
        if table is not None and not far_enough(positions, kernel.sinks, table.shape[1] // 2):
            return None
        seen = positions.tokens
    if len(seen) != key.shape[0]:
        return None
    if query.shape[2] == key.shape[2] == 1 and seen and min(seen) == max(seen):
        (q, k, v), scale = one_token(kernel, (query, key, value), scale, seen[0])
    else:
        place = plain_positions(key.shape[2], seen)
        (q, k, v), scale = with_positions(kernel, (query, key, value), scale, place)
    found = _served(q, k, v, kernel, scale, state, gqa, table)
    return None if found is None else (found[0].to(query.dtype), found[1])


def _served(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: NearFar,
    scale: float | None,
    state: State | None,
    gqa: bool,
    table: Tensor | None = None,
) -> tuple[Tensor, PackedState] | None:
    """Causal attention and the state after it. table: the kernel's position biases."""
    plan = _find_plan(kernel, scale, gqa, query, key, value)
    if table is not None and plan is not None and not plan.form.has_table(table):  # it was trained meanwhile
        kernel.native_plans.clear()
        plan = _find_plan(kernel, scale, gqa, query, key, value)
    if plan is None:
        return None
    tokens, form = (query, key, value), plan.form
    if state is None:
        return None if plan.first is None else _prefill(plan, tokens, plan.empty, growth=plan.first)
    packed = _packed(state, kernel, plan)
    if packed is None:
        return None
    if query.shape[2] > 1:
        if packed.positions.all_exact(form, min(form.budgets), plan.counts):
            return None
        return _prefill(plan, tokens, packed)
    if min(packed.positions.tokens) < form.sinks or any(t % form.block == 0 for t in packed.positions.tokens):
        return _prefill(plan, tokens, packed, spare=form.block)
    return _decode(plan, tokens, packed)


def _packed(state: State, kernel: NearFar, plan: Plan) -> PackedState | None:
    """The packed form of a state; None if it does not fit the plan."""
    if not isinstance(state, NearFarState) or state.kernel != plan.signature:
        return None
    packed: PackedState | None = pack_of(state)
    if packed is None:
        return _validated(state, kernel, plan)
    prepared = packed.buffer.prepared
    known = prepared is not None and prepared.plan is plan
    return packed if known or _sizes(packed) == plan.sizes else None


def _prefill(
    plan: Plan, tokens: Tokens, state: PackedState, spare: int = 0, growth: Growth | None = None
) -> tuple[Tensor, PackedState]:
    out, after = advance(Inputs(plan.form, *tokens, None, plan.counts, True), state, spare, growth=growth)
    assert out is not None
    return out.to(tokens[0].dtype), after


def _decode(plan: Plan, tokens: Tokens, state: PackedState) -> tuple[Tensor, PackedState]:
    """One token inside a block: it is written behind the near tokens, and most other tensors stay as they are."""
    form, seen = plan.form, state.positions.tokens
    near, prepared = min(state.near_length, form.window + form.block - 1), state.buffer.prepared
    if not state.buffer.take(state.end):
        state, prepared = _with_own_buffer(state, near, form.block), None
    if prepared is None or prepared.plan is not plan:
        query, key, value = (x.contiguous() for x in tokens)
        prepared = PreparedDecode(plan, Inputs(form, query, key, value, None, plan.counts, True), state)
        state.buffer.prepared = prepared
    phases = [t % form.block for t in seen]
    last = max(phases) == form.block - 1
    sampled = last or min(p % form.stride for p in phases) == 0
    queries = torch.empty_like(state.queries) if sampled else None
    moments = torch.empty_like(state.moments) if last else None
    out = prepared.run(tokens, state, near, (queries, moments))
    after = PackedState(
        plan.signature,
        state.buffer,
        state.end + 1,
        near + 1,
        state.positions._replace(tokens=[t + 1 for t in seen]),
        state.sink,
        state.slots,
        state.bias,
        state.received,
        state.near_received,
        state.moments if moments is None else moments,
        state.queries if queries is None else queries,
        state.far,
    )
    dtype = tokens[0].dtype
    return out if dtype is torch.float32 else out.to(dtype), after


def _with_own_buffer(state: PackedState, near: int, spare: int) -> PackedState:
    """With a copy of the last `near` tokens and free places behind them, the first of which is taken."""
    old = state.buffer.tokens
    tokens = old.new_empty(*old.shape[:2], near + spare, old.shape[3])
    tokens[:, :, :near] = old[:, :, state.end - near : state.end]
    return replace(state, buffer=NearBuffer(tokens, near + 1), end=near, near_length=near)


# Plans, kept with the kernel -----------------------------------------------------------------------------------------


def _about(kernel: NearFar, scale: float | None, gqa: bool, query: Tensor, key: Tensor, value: Tensor) -> Key:
    """What a plan depends on."""
    return kernel.changes, scale, gqa, query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype


def _keep(kernel: NearFar, about: Key, plan: object) -> object:
    if len(kernel.native_plans) >= MOST_PLANS:
        kernel.native_plans.clear()
    kernel.native_plans[about] = plan
    return plan


def _find_plan(
    kernel: NearFar, scale: float | None, gqa: bool, query: Tensor, key: Tensor, value: Tensor
) -> Plan | None:
    """The plan of causal calls; None if they are not eligible."""
    about = _about(kernel, scale, gqa, query, key, value)
    plan = kernel.native_plans.get(about, False)
    if plan is False:
        same_tokens = query.shape[2:3] == key.shape[2:3]
        fits = same_tokens and _fits(kernel, scale, gqa, query, key, value)
        plan = _keep(kernel, about, _make_plan(kernel, scale, query, key, value) if fits else None)
    return plan if isinstance(plan, Plan) else None


def _fits(kernel: NearFar, scale: float | None, gqa: bool, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if the shapes fit together, nothing is empty, and the native engine serves such a kernel and such shapes."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.dtype == key.dtype == value.dtype:
        return False
    (B, heads, L, D), (H, S, M) = query.shape, (*key.shape[1:3], value.shape[3])
    if key.shape != (B, H, S, D) or value.shape != (B, H, S, M) or 0 in (B, H, L, S, D, M):
        return False
    if heads % H or (heads != H and not gqa) or (scale is not None and not scale > 0):
        return False
    shapes = native.shape_refusal(query.shape, key.shape, value.shape, query.dtype)
    return kernel_refusal(kernel) is None and shapes is None


def _make_plan(kernel: NearFar, scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> Plan:
    (B, heads, L, D), (H, M) = query.shape, (key.shape[1], value.shape[3])
    form, signature = NativeForm.of(kernel, scale, H, D), kernel.signature(scale, D)
    counts, sizes = [L] * B, (B, H, stored_width(kernel.state_bits, D, M), heads // H, D + 1)
    about = "empty", kernel.changes, signature, sizes  # calls of all lengths begin with the same state
    empty = kernel.native_plans.get(about)
    if not isinstance(empty, PackedState):
        with torch.inference_mode(False):  # it is kept for calls outside as well
            empty = PackedState.of(NearFarState.empty(kernel, signature, query, key, value), form)
        _keep(kernel, about, empty)
    first, positions = None, empty.positions
    if not positions.all_exact(form, min(form.budgets), counts):
        first = positions.growth(form, form.budgets, [0] * H, counts)
    return Plan(signature, form, counts, sizes, empty, first)


def _sizes(state: PackedState) -> tuple[int, ...]:
    """B, H, width of an entry, G and D + 1."""
    near, queries = state.buffer.tokens.shape, state.queries.shape
    return near[0], near[1], near[3], queries[2], queries[4]


def _validated(state: NearFarState, kernel: NearFar, plan: Plan) -> PackedState | None:
    """The packed form of a state whose tensors others have seen; None if it does not fit, or needs a conversion."""
    _, _, _, G, width = plan.sizes
    try:
        _, sizes = state.validate()
        check_kernel(state, sizes, kernel, G, width - 1)
    except ValueError:
        return None
    far = FarCache.dtypes(kernel.recall_bits, torch.float32)
    stored = far | dict.fromkeys(ENTRIES, plan.form.entry_dtype)
    for name, x in state.tensors().items():
        dtype = torch.int64 if NearFarState.table[name].kind == "count" else stored.get(name, torch.float32)
        if not x.is_cpu or x.dtype is not dtype or x.is_neg() or (x.requires_grad and torch.is_grad_enabled()):
            return None
        if name not in ("near", *far) and not x.is_contiguous():
            return None
    packed = PackedState.of(state, plan.form)
    return packed if _sizes(packed) == plan.sizes else None
