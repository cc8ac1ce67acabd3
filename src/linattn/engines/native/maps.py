"""Kernels in the native code's terms: which map, its numbers and its weights, in units of log2 where it is exponential."""

import math
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...kernels import Elu, Kernel, Polynomial, Positive, Relu, Taylor, Trig
from ...kernels.precondition import prepare_key, prepare_query

EXP, TRIG, IDENTITY, ELU, RELU, QUADRATIC = range(6)
LOG2E = 1 / math.log(2)


@dataclass
class NativeMap:
    """What csrc/call.h wants to know of a feature map."""

    kind: int
    features: int
    scaled: bool = False  # keys carry log-weights
    square: float = 0.0
    constant: float = 0.0
    root: float = 1.0
    low: tuple[float, float] = (0.0, 0.0)
    high: tuple[float, float] = (0.0, 0.0)
    weights: tuple[Tensor, ...] = ()  # weight, weight_t, bias
    prepared: bool = False  # tokens are changed in torch first: `prepare`
    steps: dict[Any, Any] = field(default_factory=dict)  # what one-token calls of each shape have in common
    wholes: dict[Any, Any] = field(default_factory=dict)  # and calls from nothing that leave no state

    def numbers(self) -> tuple[list[int], list[float]]:
        """As arguments of an operator."""
        return (
            [self.kind, self.features, int(self.scaled)],
            [self.square, self.constant, self.root, *self.low, *self.high],
        )


def native_map(kernel: Kernel, scale: float | None, dim: int) -> NativeMap:
    """The map of a kernel, made once for every scale and remade when the kernel's weights change."""
    if is_compiling():  # the weights become part of the graph, and follow the kernel's
        return _make(kernel, scale, dim)
    return known_map(kernel, scale, dim)


def known_map(kernel: Kernel, scale: float | None, dim: int) -> NativeMap:
    """The same for those who know that nothing is being compiled."""
    now, number = stamp(kernel), id(kernel)
    known = _known.get(number)
    if known is None or known.kernel() is not kernel or known.stamp != now:
        known = _known[number] = _Known(weakref.ref(kernel, lambda ref: _forget(number, ref)), now, {})
    made = known.maps.get((scale, dim))
    if made is None:
        made = known.maps[scale, dim] = _make(kernel, scale, dim)
    return made


def stamp(kernel: Kernel) -> tuple[int, int] | None:
    """Another one after every change of the kernel's weights."""
    projection = kernel._buffers.get("projection")
    return None if projection is None else (projection.data_ptr(), projection._version)


class _Known(NamedTuple):
    kernel: weakref.ref[Kernel]
    stamp: object
    maps: dict[tuple[float | None, int], NativeMap]


# By id: a WeakKeyDictionary is slower than all the rest of a short call.
_known: dict[int, _Known] = {}


def _forget(number: int, ref: weakref.ref[Kernel]) -> None:
    known = _known.get(number)
    if known is not None and known.kernel is ref:  # else another kernel has that id by now
        del _known[number]


def _make(kernel: Kernel, scale: float | None, dim: int) -> NativeMap:
    if type(kernel) is Positive:
        prepared = kernel.precondition is not None
        root = 1.0 if prepared else math.sqrt(kernel.logit_scale(dim, scale))
        weight = kernel.projection.detach().double()
        bias = kernel.exponent * weight.square().sum(-1) * LOG2E if kernel.exponent else None
        weight = weight * math.sqrt(1 - 4 * kernel.exponent) * (root * LOG2E)
        if kernel.hyperbolic:
            weight, bias = torch.cat([weight, -weight]), None if bias is None else torch.cat([bias, bias])
        constant = dim / 4 * math.log1p(-4 * kernel.exponent) - math.log(kernel.features) / 2
        return NativeMap(
            EXP,
            kernel.features,
            scaled=True,
            square=-0.5 * root**2 * LOG2E,
            constant=constant * LOG2E,
            weights=_weights(weight, bias),
            prepared=prepared,
        )
    if type(kernel) is Trig:
        weights = _weights(kernel.projection.detach().double(), None)
        root = 1 / math.sqrt(kernel.features)
        return NativeMap(
            TRIG, 2 * kernel.features, scaled=True, square=0.5 * LOG2E, root=root, weights=weights, prepared=True
        )
    if type(kernel) in (Elu, Relu):
        root = 1.0 if scale is None else math.sqrt(scale)
        return NativeMap(ELU if type(kernel) is Elu else RELU, dim, root=root)
    if type(kernel) is Polynomial and kernel.degree == 2 and kernel.sketch is None:
        root, c = math.sqrt(kernel.logit_scale(dim, scale)), kernel.offset
        low = (c, math.sqrt(2 * c))
        return NativeMap(QUADRATIC, kernel.features_for(dim), root=root, low=low, high=(1.0, math.sqrt(2)))
    if type(kernel) is Taylor and kernel.order == 2:
        prepared = kernel.precondition is not None
        root = 1.0 if prepared else math.sqrt(kernel.logit_scale(dim, scale))
        high = (math.sqrt(0.5), 1.0)
        return NativeMap(QUADRATIC, kernel.features_for(dim), root=root, low=(1.0, 1.0), high=high, prepared=prepared)
    return NativeMap(IDENTITY, kernel.features_for(dim))


def prepare(kernel: Kernel, x: Tensor, scale: float | None, is_key: bool) -> tuple[Tensor, Tensor | None]:
    """What torch does before the native code: the changed tokens, and a key's log-weight where the map leaves it out."""
    if isinstance(kernel, Trig) and kernel.normalize:
        return kernel._unit(x, scale), None
    assert isinstance(kernel, (Positive, Trig, Taylor))
    return (prepare_key if is_key else prepare_query)(kernel, x, scale, kernel.precondition)


def _lead(n: int) -> int:
    return (n + 15) // 16 * 16 + 16


def _wide(n: int) -> int:
    return _lead(n) if n > 64 else (n + 15) // 16 * 16


def _weights(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(r, dim) with rows padded, its transpose likewise, and the bias of each feature: -1e30 where there is no feature.

    Without a bias, and with whole vectors of features, that is empty, and the native code has less to add.
    """
    rows, dim = weight.shape
    shapes = (rows, _wide(dim)), (dim, _lead(rows))
    padded, turned = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)
    padded[:, :dim], turned[:, :rows] = weight, weight.T
    if rows % 16 == 0 and bias is None:
        return padded, turned, padded.new_empty(0)
    wide_bias = padded.new_full((_lead(rows),), -1e30)
    wide_bias[:rows] = 0 if bias is None else bias
    return padded, turned, wide_bias
