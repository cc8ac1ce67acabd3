"""Exact softmax attention, computed by torch; it has no finite feature map."""

from torch import Tensor

from .base import Kernel, softmax_similarity


class Softmax(Kernel):
    """sim(q, k) = exp(scale q.k), computed by torch's own scaled_dot_product_attention in O(N^2)."""

    stands_for_softmax = True
    any_dim = True
    has_features = False

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        return softmax_similarity(self, query, key, scale)

    def features_for(self, dim: int) -> int:
        raise ValueError("softmax has no finite feature map: it is computed in O(N^2), without features.")

    def scaled_query_features(self, query: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        raise ValueError("softmax has no finite feature map: it is computed in O(N^2), without features.")

    def scaled_key_features(self, key: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        raise ValueError("softmax has no finite feature map: it is computed in O(N^2), without features.")
