"""Causal near/far attention of the native engine as operators of torch: one node for torch.compile, with gradients.

Keys, values and biases of slots have gradients. What is merged has none, nor have the statistics that decide it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines.native.operators import define
from ..engines.native.output_pool import FLOATS
from . import backward as calls
from .bindings import Inputs, NearBuffer, PackedState, advance, merges_shape
from .entry_codes import stored_dtype, stored_width
from .native_form import NativeForm
from .positions import Positions
from .state import ENTRIES, slots_per_head

FIELDS = ("sink", "near", "slots", "bias", "received", "near_received", "moments", "queries")  # tensors of a state
_TRAINED = 4  # the first of them, which have gradients
FIRST = (0,)

# state: the fields, or none for a call from the first token on. positions: tokens, merged and entered of all sequences, or
# FIRST, because torch takes an empty list for one of tensors.
# sizes: window, sinks, block, stride. floats: alpha, the root of the scale, and the cap. bits: of the state's entries.
_INPUTS = "Tensor? query, Tensor key, Tensor value, Tensor? mask, Tensor? band, Tensor[] state"
_NUMBERS = "int[] positions, int[] budgets, int[] sizes, float[] floats, int bits"


def _forward(*given: Any) -> tuple[Tensor, ...]:
    """The rows if they attend, the fields of the state after the tokens if `keep`, and the merges if `train`."""
    *call, attend, keep, train = given
    inputs, before = _read(call, attend)
    merges = FLOATS.new_zeros(merges_shape(inputs.form, inputs.key, before.positions.tokens)) if train else None
    out, after = advance(inputs, before, merges=merges)
    if after is before:  # every token is hidden; an operator's results are new tensors
        fields = [getattr(before, name).clone() for name in FIELDS]
    else:
        fields = [getattr(after, name) for name in FIELDS]
    none = [FLOATS.new_empty(0) for _ in range(len(FIELDS) + 2)]
    return (
        none[0] if out is None else out,
        *(fields if keep else none[1:-1]),
        none[-1] if merges is None else merges,
    )


def _backward(*given: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, the trained fields of the state, and the band."""
    *call, merges, grad_out, sink, near, slots, bias = given
    inputs, before = _read(call, True)
    return calls.backward(inputs, before, merges, grad_out, (sink, near, slots, bias))


def _read(given: Sequence[Any], attend: bool) -> tuple[Inputs, PackedState]:
    """given: _INPUTS and _NUMBERS, in the order of the schema."""
    query, key, value, mask, band, state, positions, budgets, sizes, floats, bits = given
    (window, sinks, block, stride), (alpha, sqrt_scale, logit_cap) = sizes, floats
    form = NativeForm(
        window, sinks, block, stride, alpha, sqrt_scale, tuple(budgets), logit_cap, band=band, state_bits=bits
    )
    B, H, L, D = key.shape
    counts = [L] * B if mask is None else mask.sum(-1).tolist()
    if state:
        at = Positions(*(list(positions[i * B : (i + 1) * B]) for i in range(3)))
    else:
        assert query is not None
        at, state = Positions.start(B), _empty(form, (B, H, query.shape[1] // H), D, value.shape[-1])
    return Inputs(form, query, key, value, mask, counts, attend), _packed("", at, state)


def _packed(signature: str, positions: Positions, fields: Sequence[Tensor]) -> PackedState:
    """A state from its fields, in the order of FIELDS."""
    sink, near, slots, bias, received, near_received, moments, queries = fields
    buffer, length = NearBuffer(near, near.shape[2]), near.shape[2]
    rest = slots, bias, received, near_received, moments, queries
    return PackedState(signature, buffer, length, length, positions, sink, *rest)


def _empty(form: NativeForm, heads: tuple[int, int, int], dim: int, value_dim: int) -> list[Tensor]:
    """The fields of a state before the first token. heads: B, H and the query heads of a kv head."""
    B, H, groups = heads
    W = stored_width(form.state_bits, dim, value_dim)
    first = (B, H, form.sinks, W), (B, H, 0, W), (B, 0, W), (B, 0), (B, 0, 2), (B, H, form.window, 2)
    samples = B, H, groups, form.block // form.stride, dim + 1
    shapes = *first, (B, H, 2, dim + 1), samples
    dtypes = _dtypes(form.entry_dtype)
    return [FLOATS.new_zeros(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _dtypes(stored: torch.dtype) -> list[torch.dtype]:
    """Of the fields."""
    return [stored if name in ENTRIES else torch.float32 for name in FIELDS]


_FLAGS = "bool attend, bool keep, bool train"
forward = define("nearfar", _forward, f"({_INPUTS}, {_NUMBERS}, {_FLAGS}) -> ({', '.join(['Tensor'] * 10)})")
backward = define(
    "nearfar_backward",
    _backward,
    f"({_INPUTS}, {_NUMBERS}, Tensor merges, Tensor? grad_out, Tensor? grad_sink, Tensor? grad_near, Tensor? grad_slots,"
    f" Tensor? grad_bias) -> ({', '.join(['Tensor'] * 8)})",
)


def _floats(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


@forward.register_fake
def _(query: Any, key: Any, value: Any, mask: Any, band: Any, state: Any, *rest: Any) -> Any:
    positions, budgets, (window, sinks, block, stride), _floats_given, bits, attend, keep, train = rest
    B, H, L, D = key.shape
    W = stored_width(bits, D, value.shape[3])
    form = NativeForm(window, sinks, block, stride, 0.0, 0.0, tuple(budgets))
    rows = (B, query.shape[1], L, value.shape[3]) if attend else (0,)
    shapes: list[tuple[int, ...]] = [(0,)] * len(FIELDS)
    if keep:
        at = Positions(*(list(positions[i * B : (i + 1) * B]) for i in range(3))) if state else Positions.start(B)
        used = slots_per_head(form.budgets, state[2].shape[1] if state else 0)
        slots = sum(at.slots_after(form, form.budgets, used, [L] * B))
        near = min(window + block, L + (state[1].shape[2] if state else 0))
        shapes = [(B, H, sinks, W), (B, H, near, W), (B, slots, W), (B, slots), (B, slots, 2), (B, H, window, 2)]
        groups = state[7].shape[2] if state else query.shape[1] // H
        shapes += [(B, H, 2, D + 1), (B, H, groups, block // stride, D + 1)]
    merges = merges_shape(form, key, positions[:B]) if train else (0,)
    dtypes = _dtypes(stored_dtype(bits, torch.float32) if keep else torch.float32)
    fields = [key.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return _floats(key, rows), *fields, _floats(key, merges)


@backward.register_fake
def _(
    query: Any, key: Any, value: Any, mask: Any, band: Any, state: Any, positions: Any, budgets: Any, *rest: Any
) -> Any:
    (B, H), sinks = key.shape[:2], rest[0][1]
    E = key.shape[3] + value.shape[3]
    fields: list[Sequence[int]] = [(B, H, sinks, E), (B, H, 0, E), (B, 0, E), (B, 0)]
    if state:
        fields = [*((*x.shape[:-1], E) for x in state[: _TRAINED - 1]), state[_TRAINED - 1].shape]
    shapes = (0,) if query is None else query.shape, key.shape, value.shape, *fields
    return tuple(_floats(key, shape) for shape in (*shapes, (0,) if band is None else (B, *band.shape)))


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, mask, band, state, *ctx.numbers, _attend, _keep, _train = inputs
    ctx.set_materialize_grads(False)  # of the merges too they would be made
    ctx.mark_non_differentiable(*output[1 + _TRAINED :])
    ctx.save_for_backward(query, key, value, mask, band, output[-1], *state)


def _grads(ctx: Any, grad_out: Tensor | None, *grads: Tensor | None) -> Any:
    query, key, value, mask, band, merges, *state = ctx.saved_tensors
    inputs = query, key, value, mask, band, state, *ctx.numbers
    made = backward(*inputs, merges, grad_out, *grads[:_TRAINED])
    tokens = [None if x is None else g.to(x.dtype) for g, x in zip(made[:3], (query, key, value), strict=True)]
    held = zip(made[3:7], state[:_TRAINED], strict=True) if state else []
    trained = [g.to(x.dtype) if x.is_floating_point() else None for g, x in held]
    of_state = [*trained, *[None] * (len(FIELDS) - _TRAINED)] if state else []
    return (*tokens, None, None if band is None else made[7].sum(0), of_state, *[None] * 8)


forward.register_autograd(_grads, setup_context=_context)


def _refuse_second_derivative(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        'the native engine has no second derivatives: call linattn.attention(..., engine="torch") to differentiate twice.'
    )


backward.register_autograd(_refuse_second_derivative)


def advance_with_gradients(inputs: Inputs, state: PackedState) -> tuple[Tensor | None, PackedState]:
    """`bindings.advance` through the operators: for calls that are trained."""
    if max(inputs.counts, default=0) == 0:
        return advance(inputs, state)
    fields = [getattr(state, name) for name in FIELDS]
    positions = [n for numbers in state.positions for n in numbers]
    attend = inputs.attend and inputs.query is not None
    out, *after = run(inputs, fields, positions, attend=attend, keep=True)
    places = state.positions.after(inputs.form, inputs.counts)
    return (out if attend else None), _packed(state.signature, places, after)


def run(
    inputs: Inputs, fields: Sequence[Tensor], positions: Sequence[int], *, attend: bool, keep: bool
) -> tuple[Tensor, ...]:
    """The operator: the rows, and the fields of the state after them; both are empty if they are not wanted."""
    form = inputs.form
    tensors = inputs.query, inputs.key, inputs.value, form.band, *fields[:_TRAINED]
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    sizes, floats = (form.window, form.sinks, form.block, form.stride), (form.alpha, form.sqrt_scale, form.logit_cap)
    numbers = list(positions), list(form.budgets), list(sizes), list(floats), form.state_bits
    tokens = inputs.query, inputs.key, inputs.value, inputs.mask, form.band
    found: tuple[Tensor, ...] = forward(*tokens, list(fields), *numbers, attend, keep, train)
    return found[:-1]
