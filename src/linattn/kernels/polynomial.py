"""The polynomial kernel (q.k + c)^p with exact or sketched features."""

import math

import torch
from torch import Tensor

from . import _monomials
from ._sketch import TensorSketch
from .base import Kernel
from .native_form import FeatureMap, NativeForm

WIDEST = 65536


class Polynomial(Kernel):
    """sim(q, k) = (scale q.k + offset)^degree, by the products of coordinates, all cross terms included.

    Degree 2 with an offset has 1 + D + D (D + 1) / 2 features. Where that is too wide, `sketch` draws that many
    features instead (TensorSketch): unbiased, but of either sign.

    >>> import linattn
    >>> linattn.kernels.Polynomial(degree=2, offset=1.0).features_for(64)
    2145

    Args:
        degree: at least 1. Even degrees are never negative.
        offset: c >= 0.
        sketch: number of random features in place of the exact ones; needs dim.
        dim: of queries and keys, if known beforehand.
        seed: of the sketch.
    """

    any_dim = True
    only_parameters = True

    def __init__(
        self,
        degree: int = 2,
        offset: float = 1.0,
        *,
        sketch: int | None = None,
        dim: int | None = None,
        seed: int = 0,
    ):
        super().__init__(dim)
        if degree < 1 or degree != int(degree):
            raise ValueError(f"Polynomial: degree must be a whole number of at least 1, got {degree}.")
        if offset < 0:
            raise ValueError(f"Polynomial: offset must not be negative (no real features exist), got {offset}.")
        self.degree, self.offset, self.seed = int(degree), float(offset), seed
        self.positive = degree % 2 == 0 and sketch is None
        self.sketch: TensorSketch | None = None
        if sketch is not None:
            if dim is None or sketch < 1:
                raise ValueError("Polynomial: a sketch needs dim= and at least 1 feature.")
            self.any_dim = False
            self.sketch = TensorSketch(dim + (offset > 0), self.degree, sketch, seed)

    def features_for(self, dim: int) -> int:
        if self.sketch is not None:
            return self.sketch.features
        return _monomials.count(dim + (self.offset > 0), self.degree)

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        query, key = self.widen(query), self.widen(key)
        return (query @ key.mT * self.logit_scale(query.shape[-1], scale) + self.offset).pow(self.degree)

    def query_features(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        x = self.widen(query)
        x = x * math.sqrt(self.logit_scale(x.shape[-1], scale))
        if self.offset > 0:
            x = torch.cat([torch.full_like(x[..., :1], math.sqrt(self.offset)), x], -1)
        if self.sketch is not None:
            return self.sketch(x)
        wide = _monomials.count(x.shape[-1], self.degree)
        if wide > WIDEST:
            raise ValueError(
                f"Polynomial: degree {self.degree} has {wide} exact features at dim {query.shape[-1]}, "
                f"more than {WIDEST}: pass sketch=4096, dim={query.shape[-1]} for random ones."
            )
        return _monomials.monomials(x, self.degree)

    def key_features(self, key: Tensor, *, scale: float | None = None) -> Tensor:
        return self.query_features(key, scale=scale)

    def native_form(self, dim: int, scale: float | None) -> NativeForm | None:
        if self.degree != 2 or self.sketch is not None:
            return None
        root, c = math.sqrt(self.logit_scale(dim, scale)), self.offset
        low, high = (c, math.sqrt(2 * c)), (1.0, math.sqrt(2))
        return NativeForm(FeatureMap.QUADRATIC, self.features_for(dim), input_scale=root, low=low, high=high)

    def extra_repr(self) -> str:
        text = f"degree={self.degree}, offset={self.offset:g}"
        return (
            text if self.sketch is None else f"{text}, sketch={self.sketch.features}, dim={self.dim}, seed={self.seed}"
        )
