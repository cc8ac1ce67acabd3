"""The native engine: C++ for CPUs, fused so that features never leave the cache.

Together, `shape_refusal` and `tensor_refusal` say whether it serves a call: the first depends on nothing but shapes and
types, so that plans.py can remember it; the second looks at the tensors of each call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ...kernels.base import is_recorded
from .ffi import MOST_GROUPS, library

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def available() -> bool:
    return library.why_not is None


def dtype_refusal(dtype: torch.dtype | None) -> str | None:
    """Why calls in this dtype cannot be served, or None."""
    if library.why_not is not None:
        return library.why_not
    if dtype is not None and dtype not in DTYPES:
        return f"the tensors are {dtype}, and it takes float32, float16 and bfloat16"
    return None


def shape_refusal(query: Sequence[int], key: Sequence[int], value: Sequence[int], dtype: torch.dtype) -> str | None:
    """Why attention of these shapes (B, heads, tokens, dim) cannot be served, or None."""
    if value[-1] == 0 or query[1] > MOST_GROUPS * key[1]:
        return f"it takes values of at least one number and at most {MOST_GROUPS} query heads for a kv head"
    return dtype_refusal(dtype)


def tensor_refusal(*tensors: Tensor) -> str | None:
    """Why a call with these tensors cannot be served, or None."""
    for x in tensors:
        if not x.is_cpu:
            return f"the tensors are on {x.device}, and it runs on CPUs"
    if torch.compiler.is_compiling():
        return None
    others = [x for x in tensors if type(x) is not Tensor and type(x) is not Parameter]
    if others:
        kinds = sorted({type(x).__name__ for x in others})
        return f"the tokens are {', '.join(kinds)}, whose memory only torch's own operators can read"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms need torch's own operators"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation needs torch's own operators"
    if is_recorded():
        return "fake tensors, make_fx and torch.jit.trace need torch's own operators"
    return None


def describe() -> str:
    if library.why_not is not None:
        return f"not available: {library.why_not}"
    return (
        f"available: {library.isa}, {library.threads} threads; float32, float16, bfloat16 on CPUs; "
        "near/far attention, with gradients if causal and without recall"
    )


if available():
    from .linear import causal, read_state, update_state

__all__ = ["available", "describe", "dtype_refusal", "shape_refusal", "tensor_refusal"]
if available():
    __all__ += ["causal", "read_state", "update_state"]
