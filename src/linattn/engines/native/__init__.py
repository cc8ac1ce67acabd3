"""The native engine: C++ for CPUs, fused so that features never leave the cache."""

import torch
from torch import Tensor

from ...kernels.base import Kernel
from .library import MOST_GROUPS, library

CHECKS_FINITE = True  # the sums and denominators say so by themselves


def available() -> bool:
    return library.why_not is None


def refusal(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why this call cannot be served, or None. docs/native.md has the same list."""
    if library.why_not is not None:
        return library.why_not
    if query.device.type != "cpu":
        return f"the tensors are on {query.device}, and it runs on CPUs"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the tensors are {query.dtype}, and it takes float32, float16 and bfloat16"
    if value.shape[-1] == 0 or query.shape[1] > MOST_GROUPS * key.shape[1]:
        return f"it takes values of at least one number and at most {MOST_GROUPS} query heads for a kv head"
    projection = getattr(kernel, "projection", None)
    if projection is not None and projection.requires_grad:
        return "the projection wants a gradient, which it does not compute"
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return "torch.func transforms need torch's own operators"
        if torch.autograd.forward_ad._current_level >= 0:
            return "forward-mode differentiation needs torch's own operators"
    return None


def describe() -> str:
    if library.why_not is not None:
        return f"not available: {library.why_not}"
    return (
        f"available: {library.isa}, {library.threads} threads; float32, float16, bfloat16 on CPUs; "
        "near/far attention without gradients or recall"
    )


if available():
    from . import nearfar
    from .primitives import absorb, causal, read
    from .step import step
    from .whole import whole

    __all__ = ["absorb", "available", "causal", "describe", "nearfar", "read", "refusal", "step", "whole"]
else:
    __all__ = ["available", "describe", "refusal"]
