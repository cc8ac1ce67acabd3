"""When a layer's steps between its projections can be one native call."""

from typing import Any

from ...engines.native import available
from ...functional import routing

LEAST_TOKENS = 16  # of a prompt
WIDTHS = range(2, 5)  # of the convolution: csrc/core/convolve_rows.h
STEP = 16  # head dims are multiples of it
PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")  # arguments that say where packed sequences begin


def begins_here(layer: Any, cache: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the tokens are one sequence from its first token on, which this process computes natively by itself."""
    if not available() or routing.current() is not None:
        return False
    if any(kwargs.get(name) is not None for name in PACKED):
        return False
    if cache is None:
        return True
    states = cache.get_conv_state(layer.layer_idx, state_idx=0), cache.get_recurrent_state(layer.layer_idx, state_idx=0)
    return states == (None, None)
