"""The backward pass of causal near/far attention in the native library: tensors into pointers."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ..engines.native import output_pool
from ..engines.native.bindings import check_flags
from ..engines.native.ffi import NearFarGrads, library
from ..engines.native.output_pool import FLOATS
from .bindings import Inputs, PackedState, offsets, prepare_call, set_merges
from .state import slots_per_head

# Gradients of a state's sink, near, slots and bias; its other fields are statistics, which have none.
StateGrads = Sequence[Tensor | None]


def backward(
    inputs: Inputs, state: PackedState, merges: Tensor, grad_out: Tensor | None, grad_after: StateGrads
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, the state's sink, near, slots and bias, and of the band, all float32.

    inputs, state: as `bindings.advance` got them. merges: what it wrote. The gradient of the band is (B, Hq, n), one for
    each sequence. Those of a query or band that is not there are empty.
    """
    form, counts, key, value, query = inputs.form, inputs.counts, inputs.key, inputs.value, inputs.query
    used = slots_per_head(form.budgets, state.slots.shape[1])
    grown = state.positions.slots_after(form, form.budgets, used, counts)
    call, alive = prepare_call(inputs, state, used)
    set_merges(call, form, merges)
    call.near_tokens_new = min(form.window + form.block, state.near_length + key.shape[2])
    call.slots_new, first = sum(grown), offsets(grown)
    call.first_slot_new = ctypes.addressof(first)
    mask = None if inputs.mask is None else inputs.mask.contiguous()
    call.mask = None if mask is None else mask.data_ptr()
    given = [None if x is None else x.float().contiguous() for x in (grad_out, *grad_after)]
    tokens = output_pool.empty if mask is None else FLOATS.new_zeros  # rows of hidden tokens are not written
    queries = FLOATS.new_zeros if grad_out is None else tokens
    band = (key.shape[0], *form.band.shape) if form.band is not None else (0,)
    numbers = key.shape[3] + value.shape[3]
    made = [
        queries(*query.shape) if query is not None else FLOATS.new_zeros(0),
        tokens(*key.shape),
        tokens(*value.shape),
        *(FLOATS.new_zeros(*x.shape[:-1], numbers) for x in (state.sink, state.near, state.slots)),
        FLOATS.new_zeros(*state.bias.shape),
        FLOATS.new_zeros(*band),
    ]
    grads = NearFarGrads(ctypes.pointer(call), *(None if x is None else x.data_ptr() for x in (*given, *made)))
    if form.band is None:
        grads.band = None
    check_flags(library.nearfar_backward(ctypes.byref(grads)))
    del alive
    return tuple(made)
