"""Feature maps that act on each coordinate by itself: elu + 1 and relu."""

import math

import torch
from torch import Tensor

from .base import Kernel


class Elementwise(Kernel):
    """phi applied to sqrt(scale) x, coordinate by coordinate; one feature for each."""

    any_dim = True
    only_parameters = True

    def phi(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def features_for(self, dim: int) -> int:
        return dim

    def query_features(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        x = self._widen(query)
        return self.phi(x if scale is None else x * math.sqrt(scale))

    def key_features(self, key: Tensor, *, scale: float | None = None) -> Tensor:
        return self.query_features(key, scale=scale)


class Elu(Elementwise):
    """phi(x) = elu(x) + 1, always positive (Katharopoulos et al., 2020). Meant for models trained with it.

    >>> import torch, linattn
    >>> linattn.kernels.Elu().query_features(torch.tensor([[0.0, 2.0]]))
    tensor([[1., 3.]])
    """

    def phi(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


class Relu(Elementwise):
    """phi(x) = max(x, 0). A query that shares no positive coordinate with any key gets 0, and is counted as guarded.

    >>> import torch, linattn
    >>> linattn.kernels.Relu().query_features(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]])
    """

    def phi(self, x: Tensor) -> Tensor:
        return x.relu()
