"""Which engine serves a call, and why: decided here and nowhere else."""

from types import ModuleType

from torch import Tensor

from ..kernels.base import Kernel
from . import native, torch_engine
from .call import ENGINES, Call


def serves_natively(engine: object, refusal: str | None) -> bool:
    """Whether the native engine serves a call; "auto" takes it wherever it can. refusal: why it cannot, or None."""
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; engines: {', '.join(ENGINES)}.")
    if engine == "native" and refusal is not None:
        raise ValueError(f'engine="native" cannot serve this call: {refusal}. engine="torch" can.')
    return engine != "torch" and refusal is None


def choose(call: Call, query: Tensor, key: Tensor, value: Tensor, refusal: str | None = None) -> ModuleType:
    """The engine of a call of linear or near/far attention.

    refusal: the reason why the native engine cannot serve this kind of attention, if there is one.
    """
    reason = refusal or attention_refusal(call, query, key, value)
    return native if serves_natively(call.engine, reason) else torch_engine


def attention_refusal(call: Call, query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why the native engine cannot serve this call of attention, or None. docs/native.md has the same list."""
    if not call.normalize:
        return "features with log-weights always come with a denominator there"
    shapes = native.shape_refusal(query.shape, key.shape, value.shape, query.dtype)
    return shapes or native.tensor_refusal(query, key, value) or _projection_refusal(call.kernel)


def rule_refusal(*tensors: Tensor | None) -> str | None:
    """Why the native form of an update rule cannot serve these tensors, or None. The first one has the dtype of the call."""
    given = [x for x in tensors if x is not None]
    return native.dtype_refusal(given[0].dtype) or native.tensor_refusal(*given)


def _projection_refusal(kernel: Kernel) -> str | None:
    projection = getattr(kernel, "projection", None)
    if projection is not None and projection.requires_grad:
        return "the projection wants a gradient, which it does not compute"
    if projection is not None and not projection.is_cpu:
        return f"the kernel's projection is on {projection.device}"
    return None


def describe() -> dict[str, str]:
    """Engine -> whether it can be used, and why not."""
    return {"torch": "available: any device, any kernel", "native": native.describe()}
