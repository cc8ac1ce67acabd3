"""Projections: for one token or two, where reading the weights is all the work, and for prompts, where arithmetic is."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engines.native import available, mixer
from ..engines.native.plans import eligible
from .replaced import Replaced, is_hooked, replace_forward

FEW_ROWS = 2  # at most; torch's matrix product is as fast for more
LEAST_WEIGHTS = 2**20  # for few rows, outside of linear layers; with fewer, deciding takes as long as is gained
MANY_ROWS = 512  # at least; with fewer, reordering the weights costs more than it gains
MOST_OUTPUTS = (
    2**25
)  # in all: the engine keeps the memory of its outputs, which for logits of a whole prompt is too much


def serve_projections(model: nn.Module, linear_layers: Iterable[nn.Module] = ()) -> list[Replaced]:
    """Puts our forward on every nn.Linear; on those of a subclass, which may be quantized, it does not."""
    always = {child for layer in linear_layers for child in layer.children()}  # for few rows, whatever their size
    found = [module for module in model.modules() if type(module) is nn.Linear]
    return [replace_forward(module, LinearForward(module, small=module in always)) for module in found]


class LinearForward:
    """Stands in for `forward` on one nn.Linear."""

    def __init__(self, module: nn.Module, small: bool = False):
        self.module: Any = module
        self.small = small

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        form = native_form(x, weight, bias, self.small)
        if form is None:
            return F.linear(x, weight, bias)
        return form(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def project_in_order(linear: nn.Module, x: Tensor, order: Callable[[], Tensor]) -> Tensor | None:
    """linear(x)[..., order()] without a second pass; None where the native product does not serve the call, or a hook on the
    module would miss it."""
    own: Any = linear
    if not isinstance(own.__dict__.get("forward"), LinearForward):
        return None
    form = None if is_hooked(own) else native_form(x, own.weight, own.bias, own.forward.small)
    if form is None:
        return None
    places = order()
    bias = None if own.bias is None else own.bias[places]
    return form(x.reshape(-1, x.shape[-1]), own.weight, bias, places).view(*x.shape[:-1], -1)


def project_scaled(linear: nn.Module, rows: int) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The function (x, row_scale, input_scale) -> linear(x * row_scale[..., None] * input_scale) without a pass over x, for
    x (.., inputs) with so many rows in all, float32 and contiguous; None where the native product does not serve it, or a hook
    on the module would miss it."""
    own: Any = linear
    if not isinstance(own.__dict__.get("forward"), LinearForward):
        return None
    x = own.weight.new_empty(1).expand(rows, own.weight.shape[1])  # stands for what is not there yet
    if is_hooked(own) or native_form(x, own.weight, own.bias) is not mixer.project_many:
        return None

    def project(x: Tensor, row_scale: Tensor, input_scale: Tensor) -> Tensor:
        flat, scales = x.reshape(-1, x.shape[-1]), {"row_scale": row_scale.flatten(), "input_scale": input_scale}
        return mixer.project_many(flat, own.weight, own.bias, **scales).view(*x.shape[:-1], -1)

    return project


def native_form(x: Tensor, weight: Tensor, bias: Tensor | None, small: bool = False) -> Callable[..., Tensor] | None:
    """The native product that serves this call of F.linear faster than torch, or None. small: small weights too."""
    outputs, inputs = weight.shape
    rows = x.numel() // max(1, inputs)
    few = rows <= FEW_ROWS and (small or weight.numel() >= LEAST_WEIGHTS)
    many = rows >= MANY_ROWS and rows * outputs <= MOST_OUTPUTS
    if not (few or many) or x.shape[-1] != inputs or not _served(x, weight, bias):
        return None
    if few:
        return mixer.project
    return mixer.project_many if mixer.project_many_wins() else None


def _served(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = (x, weight) if bias is None else (x, weight, bias)
    if not all(y.dtype is torch.float32 for y in given) or not all(y.is_contiguous() for y in given[1:]):
        return False
    return available() and eligible(*given) and not torch.is_autocast_enabled("cpu") and x.numel() > 0
