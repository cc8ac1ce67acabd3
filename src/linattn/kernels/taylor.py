"""The Taylor polynomial of the exponential."""

import math

import torch
from torch import Tensor

from . import _monomials
from .base import Kernel
from .native_form import FeatureMap, NativeForm
from .precondition import Precondition, named, prepare_key, prepare_query


class Taylor(Kernel):
    """sim(q, k) = 1 + s + s^2 / 2 + .. + s^order / order!, s = scale q.k, exactly. Good while s stays small.

    With a precondition, s is the product of the centred vectors and the rest of exp(q.k) is kept exactly.

    >>> import linattn
    >>> linattn.kernels.Taylor(order=2).features_for(64)
    2145

    Args:
        order: 1 to 3; even orders are never negative.
        precondition: centring and balancing from given statistics.
        dim: of queries and keys, if known beforehand.
    """

    stands_for_softmax = True
    any_dim = True
    only_parameters = True

    def __init__(self, order: int = 2, *, precondition: Precondition | None = None, dim: int | None = None):
        super().__init__(dim)
        if order not in (1, 2, 3):
            raise ValueError(f"Taylor: order must be 1, 2 or 3, got {order}.")
        self.order = order
        self.positive = order % 2 == 0
        self.precondition = precondition

    def features_for(self, dim: int) -> int:
        return sum(_monomials.count(dim, degree) for degree in range(self.order + 1))

    @property
    def log_weighted(self) -> bool:
        return self.precondition is not None

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        x, query_weight = prepare_query(self, query, scale, self.precondition)
        y, key_weight = prepare_key(self, key, scale, self.precondition)
        s = x @ y.mT
        total = sum((s.pow(n) / math.factorial(n) for n in range(2, self.order + 1)), 1 + s)
        if query_weight is None or key_weight is None:
            return total
        return total * (query_weight.unsqueeze(-1) + key_weight.unsqueeze(-2)).exp()

    def scaled_query_features(self, query: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        x, log_weight = prepare_query(self, query, scale, self.precondition)
        return self._powers(x), log_weight

    def scaled_key_features(self, key: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        y, log_weight = prepare_key(self, key, scale, self.precondition)
        return self._powers(y), log_weight

    def _powers(self, x: Tensor) -> Tensor:
        orders = range(self.order + 1)
        return torch.cat([_monomials.monomials(x, n) / math.sqrt(math.factorial(n)) for n in orders], -1)

    def native_form(self, dim: int, scale: float | None) -> NativeForm | None:
        if self.order != 2:
            return None
        prepared = self.precondition is not None
        root = 1.0 if prepared else math.sqrt(self.logit_scale(dim, scale))
        low, high = (1.0, 1.0), (math.sqrt(0.5), 1.0)
        features = self.features_for(dim)
        return NativeForm(FeatureMap.QUADRATIC, features, input_scale=root, low=low, high=high, prepared=prepared)

    def native_inputs(self, x: Tensor, scale: float | None, *, is_key: bool) -> tuple[Tensor, Tensor | None]:
        return (prepare_key if is_key else prepare_query)(self, x, scale, self.precondition)

    def extra_repr(self) -> str:
        return ", ".join([f"order={self.order}", *named(self.precondition)])
