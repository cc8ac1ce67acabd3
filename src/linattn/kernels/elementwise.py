"""Feature maps that act on each coordinate by itself: elu + 1, relu and the identity."""

import math

import torch
from torch import Tensor

from .base import Kernel
from .native_form import FeatureMap, NativeForm


def _root(scale: float | None) -> float:
    return 1.0 if scale is None else math.sqrt(scale)


class Elementwise(Kernel):
    """phi applied to sqrt(scale) x, coordinate by coordinate; one feature for each."""

    any_dim = True
    only_parameters = True

    def phi(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def features_for(self, dim: int) -> int:
        return dim

    def query_features(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        x = self.widen(query)
        return self.phi(x if scale is None else x * _root(scale))

    def key_features(self, key: Tensor, *, scale: float | None = None) -> Tensor:
        return self.query_features(key, scale=scale)


class Elu(Elementwise):
    """phi(x) = elu(x) + 1, always positive (Katharopoulos et al., 2020). For models trained with it.

    >>> import torch, linattn
    >>> linattn.kernels.Elu().query_features(torch.tensor([[0.0, 2.0]]))
    tensor([[1., 3.]])
    """

    def phi(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp_max(0).exp())

    def native_form(self, dim: int, scale: float | None) -> NativeForm:
        return NativeForm(FeatureMap.ELU, dim, input_scale=_root(scale))


class Relu(Elementwise):
    """phi(x) = max(x, 0). A query without a positive coordinate in common with any key gets 0 and is counted as guarded.

    >>> import torch, linattn
    >>> linattn.kernels.Relu().query_features(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]])
    """

    def phi(self, x: Tensor) -> Tensor:
        return x.relu()

    def native_form(self, dim: int, scale: float | None) -> NativeForm:
        return NativeForm(FeatureMap.RELU, dim, input_scale=_root(scale))


class Identity(Elementwise):
    """phi(x) = x, so that sim(q, k) = scale q.k. Signed, for `normalize=False` (retention, lightning, GLA, SSD).

    >>> import torch, linattn
    >>> q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    >>> out = linattn.attention(q, k, v, kernel="identity", normalize=False)
    >>> torch.allclose(out, q @ k.mT @ v, atol=1e-5)
    True
    """

    positive = False

    def phi(self, x: Tensor) -> Tensor:
        return x
