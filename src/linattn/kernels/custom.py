"""User-defined feature maps."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .base import Kernel, is_plain


class Custom(Kernel):
    """sim(q, k) = phi_q(q) . phi_k(k) for user-defined functions (..., tokens, dim) -> (..., tokens, features).

    >>> import torch, linattn
    >>> kernel = linattn.kernels.Custom(torch.nn.functional.softplus)
    >>> q = torch.randn(1, 2, 100, 16)
    >>> linattn.attention(q, q, q, kernel=kernel, is_causal=True).shape
    torch.Size([1, 2, 100, 16])

    Args:
        phi_q: features of the queries; an nn.Module is registered, so its weights are trained and saved.
        phi_k: features of the keys; by default phi_q.
        positive: negative features raise an error. False allows any sign.
        dim: of queries and keys, if known beforehand.
    """

    any_dim = True

    def __init__(
        self,
        phi_q: Callable[[Tensor], Tensor],
        phi_k: Callable[[Tensor], Tensor] | None = None,
        *,
        positive: bool = True,
        dim: int | None = None,
    ):
        super().__init__(dim)
        if not callable(phi_q) or not (phi_k is None or callable(phi_k)):
            raise TypeError("Custom: phi_q and phi_k must be functions of a tensor of tokens.")
        self.phi_q = phi_q
        self.phi_k = phi_q if phi_k is None else phi_k
        self.positive = positive
        self._counts: dict[int, int] = {}  # dim -> features

    def features_for(self, dim: int) -> int:
        return self.features_of(torch.zeros(1, dim))

    def features_of(self, x: Tensor) -> int:
        if x.shape[-1] in self._counts:
            return self._counts[x.shape[-1]]
        with torch.no_grad():
            count = self.phi_k(self.widen(x.new_zeros(1, 1, 1, x.shape[-1]))).shape[-1]
        if not torch.compiler.is_compiling():
            self._counts[x.shape[-1]] = count
        return count

    def query_features(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        return self._apply_phi("phi_q", self.phi_q, query, scale)

    def key_features(self, key: Tensor, *, scale: float | None = None) -> Tensor:
        return self._apply_phi("phi_k", self.phi_k, key, scale)

    def _apply_phi(self, name: str, phi: Callable[[Tensor], Tensor], x: Tensor, scale: float | None) -> Tensor:
        x = self.widen(x)
        features = phi(x if scale is None else x * math.sqrt(scale))
        if features.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"Custom: {name} must map (..., tokens, dim) to (..., tokens, features); "
                f"it made {tuple(features.shape)} of {tuple(x.shape)}."
            )
        if self.positive and is_plain(features) and features.numel() and features.detach().amin() < 0:
            raise ValueError(
                f"Custom: {name} gave negative features, with which a denominator can vanish. "
                "Make it positive, or pass Custom(..., positive=False) if that is meant."
            )
        return features

    def signature(self, scale: float | None = None, dim: int | None = None) -> str:
        text = super().signature(scale)
        return text if dim is None else f"{text} dim={dim}"

    def extra_repr(self) -> str:
        return f"phi_q={_name(self.phi_q)}, phi_k={_name(self.phi_k)}, positive={self.positive}"


def _name(phi: object) -> str:
    return getattr(phi, "__name__", type(phi).__name__)
