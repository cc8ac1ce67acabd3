"""Positive random features of the softmax kernel: FAVOR+, its hyperbolic pairs, and the variance-optimal FAVOR++."""

import math

import torch
from torch import Tensor

from ._projection import draw
from .base import Kernel, softmax_similarity
from .native_form import FeatureMap, NativeForm
from .precondition import Precondition, named, prepare_key, prepare_query

LOG2E = 1 / math.log(2)


class Positive(Kernel):
    """phi(x)_i = exp(w_i.x' - |x'|^2 / 2) / sqrt(r), x' = x / dim^(1/4): unbiased for exp(q.k / sqrt(dim)), never negative.

    >>> import torch, linattn
    >>> kernel = linattn.kernels.Positive(64, features=256, seed=0)
    >>> kernel.query_features(torch.randn(10, 64)).shape
    torch.Size([10, 256])

    Args:
        dim: of queries and keys.
        features: r. The error falls as 1/sqrt(r), the cost grows as r.
        orthogonal: rows of w orthogonal in blocks of dim (less variance); False draws them independently.
        hyperbolic: half as many w, each used with both signs.
        optimal: the variance-optimal exponent of Likhosherstov et al. (2022): with `orthogonal` this is FAVOR++,
            without it OPRF. Features become exp(A |w|^2 + sqrt(1 - 4A) w.x' - |x'|^2 / 2), A <= 0.
        mean_square: for `optimal`, the expected |q' + k'|^2; by default that of unit-Gaussian q and k, 2 sqrt(dim).
        precondition: centring and balancing from given statistics.
        seed: of the projection, which is a buffer: saved, loaded and moved with the kernel.
    """

    stands_for_softmax = True
    only_parameters = True

    def __init__(
        self,
        dim: int,
        features: int = 256,
        *,
        orthogonal: bool = True,
        hyperbolic: bool = False,
        optimal: bool = False,
        mean_square: float | None = None,
        precondition: Precondition | None = None,
        seed: int = 0,
    ):
        super().__init__(dim)
        if features < 1:
            raise ValueError(f"Positive: features must be at least 1, got {features}.")
        if hyperbolic and features % 2:
            raise ValueError(f"Positive: hyperbolic features come in pairs, so features must be even, got {features}.")
        if mean_square is not None and (not optimal or mean_square <= 0):
            raise ValueError("Positive: mean_square is a positive number and goes with optimal=True.")
        self.features, self.orthogonal, self.hyperbolic, self.seed = features, orthogonal, hyperbolic, seed
        self.optimal = optimal
        self.mean_square = mean_square
        self.exponent = optimal_exponent(dim, mean_square or 2 * math.sqrt(dim)) if optimal else 0.0  # A
        self.precondition = precondition
        rows = features // 2 if hyperbolic else features
        self.register_buffer("projection", draw(rows, dim, seed, orthogonal))
        self.projection: Tensor  # (r, dim), or (r / 2, dim) for pairs

    def features_for(self, dim: int) -> int:
        return self.features

    def projection_flops(self, dim: int) -> int:
        return 2 * dim * self.projection.shape[0]

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        return softmax_similarity(self, query, key, scale)

    def scaled_query_features(self, query: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
        x, log_weight = prepare_query(self, query, scale, self.precondition)
        return self._scaled(x, log_weight)

    def scaled_key_features(self, key: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
        y, log_weight = prepare_key(self, key, scale, self.precondition)
        return self._scaled(y, log_weight)

    def _scaled(self, x: Tensor, log_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        projection = self.projection.to(x.dtype)
        logits = x @ projection.T * math.sqrt(1 - 4 * self.exponent)  # (..., N, r)
        if self.hyperbolic:
            logits = torch.cat([logits, -logits], -1)
        if self.exponent:
            square = projection.square().sum(-1)
            logits = logits + self.exponent * (torch.cat([square, square]) if self.hyperbolic else square)
        top = logits.detach().amax(-1, keepdim=True)
        constant = x.shape[-1] / 4 * math.log1p(-4 * self.exponent) - math.log(self.features) / 2
        weight = top.squeeze(-1) - x.square().sum(-1) / 2 + constant
        return (logits - top).exp(), weight if log_weight is None else weight + log_weight

    def native_form(self, dim: int, scale: float | None) -> NativeForm:
        prepared = self.precondition is not None
        root = 1.0 if prepared else math.sqrt(self.logit_scale(dim, scale))
        projection = self.projection.detach().double()
        bias = self.exponent * projection.square().sum(-1) * LOG2E if self.exponent else None
        projection = projection * math.sqrt(1 - 4 * self.exponent) * (root * LOG2E)
        if self.hyperbolic:
            projection = torch.cat([projection, -projection])
            bias = None if bias is None else torch.cat([bias, bias])
        constant = dim / 4 * math.log1p(-4 * self.exponent) - math.log(self.features) / 2
        return NativeForm(
            FeatureMap.EXP,
            self.features,
            log_weighted=True,
            norm_factor=-0.5 * root**2 * LOG2E,
            log2_constant=constant * LOG2E,
            projection=projection,
            bias=bias,
            prepared=prepared,
        )

    def native_inputs(self, x: Tensor, scale: float | None, *, is_key: bool) -> tuple[Tensor, Tensor | None]:
        return (prepare_key if is_key else prepare_query)(self, x, scale, self.precondition)

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}, features={self.features}, orthogonal={self.orthogonal}"]
        parts += ["hyperbolic=True"] * self.hyperbolic
        parts += [f"optimal=True, mean_square={self.mean_square}"] * self.optimal
        parts += [f"seed={self.seed}", *named(self.precondition)]
        return ", ".join(parts)


def optimal_exponent(dim: int, mean_square: float) -> float:
    """A, the coefficient of |w|^2 for which the features' variance is least at this mean of |q' + k'|^2."""
    root = math.sqrt((2 * mean_square + dim) ** 2 + 8 * dim * mean_square)
    ratio = (root - 2 * mean_square - dim) / (4 * mean_square)
    return (1 - 1 / ratio) / 8
