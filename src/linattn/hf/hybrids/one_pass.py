"""When a layer's steps between its projections can be one native call."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engines.native import available
from ...engines.native.strided import LayerPast
from ...functional import routing
from .state_checks import check_state

LEAST_TOKENS = 16  # of a prompt
WIDTHS = range(2, 5)  # of the convolution: csrc/core/convolve_rows.h
STEP = 16  # head dims are multiples of it
PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")  # arguments that say where packed sequences begin


def served_alone(layer: Any, kwargs: dict[str, Any]) -> bool:
    """Whether each row of a batch is one sequence, which this process computes natively by itself, in the dtype of the layer
    and without gradients of its weights."""
    if not available() or routing.current() is not None or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in layer.parameters()):
        return False
    return all(kwargs.get(name) is None for name in PACKED)


def states_of(layer: Any, cache: Any, batch: int, *sizes: int) -> list[Tensor] | None:
    """The inputs that the convolution holds (B, channels, held) and the recurrent state (B, *sizes); [] before the first token;
    None where a cache has only one of them."""
    if cache is None:
        return []
    both = cache.get_conv_state(layer.layer_idx, state_idx=0), cache.get_recurrent_state(layer.layer_idx, state_idx=0)
    found = [x for x in both if x is not None]
    if len(found) == 2:
        check_state(found[0], batch, layer.conv1d.weight.shape[0])
        check_state(found[1], batch, *sizes)
    return None if len(found) == 1 else found


def layer_past(states: list[Tensor], width: int, *, transposed: bool = False) -> LayerPast | None:
    """What `states_of` found as the engine reads it, in memory of its own; None before the first token. width: of the
    convolution. transposed: the cache holds (B, H, M, D) for the state."""
    if not states:
        return None
    held, state = states
    history = held[..., 1 - width :]
    history = F.pad(history, (width - 1 - history.shape[-1], 0)).transpose(1, 2)
    state = state.mT if transposed else state
    return LayerPast(*(x.clone(memory_format=torch.contiguous_format) for x in (history, state)))
