"""The merging rule in the native library, for calls without is_causal: many problems at once, no table of all costs."""

import ctypes

import torch
from torch import Tensor

from ..engines.native.bindings import check_flags
from ..engines.native.ffi import MergeCall, library
from ..engines.native.output_pool import COUNTS, FLOATS


def merge(
    entries: Tensor,
    bias: Tensor,
    rate: Tensor | None,
    size: int,
    anchor: Tensor,
    metric: Tensor,
    alpha: float,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """linattn.nearfar.merge.merge without a table of all costs.

    entries (B, H, n, E), bias and rate (B, H, n), anchor and metric (B, H, 1, D).
    """
    B, H, n, E = entries.shape
    D = metric.shape[-1]
    old = [x.contiguous() for x in (entries, bias, anchor, metric, *([] if rate is None else [rate]))]
    new = FLOATS.new_empty(B, H, size, E), FLOATS.new_empty(B, H, size), COUNTS.new_empty(B, H, n)
    call = MergeCall(problems=B * H, slots=n, size=size, dim=D, value_dim=E - D, alpha=alpha, logit_cap=cap or 0.0)
    call.threads = torch.get_num_threads()
    call.slot, call.bias, call.anchor, call.metric = (x.data_ptr() for x in old[:4])
    call.rate = None if rate is None else old[4].data_ptr()
    call.slot_new, call.bias_new, call.place = (x.data_ptr() for x in new)
    check_flags(library.nearfar_merge(ctypes.byref(call)))
    return new
