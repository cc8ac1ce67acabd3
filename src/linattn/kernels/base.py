"""What every kernel is: a similarity of queries and keys that factors into features."""

import torch
from torch import Tensor, nn


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that features and sums are computed in: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_plain(*tensors: Tensor) -> bool:
    """Values can be looked at without breaking a graph, a transform or a device's queue."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(x.device.type == "cpu" for x in tensors)


class Kernel(nn.Module):
    """A similarity sim(q, k) = phi_q(q) . phi_k(k), so that attention with it is linear in the number of tokens.

    A kernel of your own needs three methods: `query_features`, `key_features` and, where the similarity it stands for
    is not simply the product of its features, `similarity`. Layout is (..., heads, tokens, dim).

    Attributes:
        stands_for_softmax: `scale=None` then means 1/sqrt(dim), as in torch; otherwise 1.
        positive: the similarity is never negative, so that denominators keep their sign.
        any_dim: it holds no weights of a given dim, and so takes tokens of any.
        only_parameters: its features depend on nothing but the tokens, its parameters and constants. A kernel that
            uses other tensors with gradients leaves this False, and is differentiated by torch's own checkpoints.
    """

    stands_for_softmax: bool = False
    positive: bool = True
    any_dim: bool = False
    only_parameters: bool = False

    def __init__(self, dim: int | None = None):
        super().__init__()
        if dim is not None and dim < 1:
            raise ValueError(f"{type(self).__name__}: dim must be at least 1, got {dim}.")
        self.dim = dim

    # What a subclass says ------------------------------------------------------------------------------------------

    def query_features(self, query: Tensor, *, scale: float | None = None) -> Tensor:
        """phi_q: (..., tokens, dim) -> (..., tokens, feature_dim)."""
        features, log_weight = self.scaled_query_features(query, scale=scale)
        return features if log_weight is None else features * log_weight.exp().unsqueeze(-1)

    def key_features(self, key: Tensor, *, scale: float | None = None) -> Tensor:
        """phi_k: (..., tokens, dim) -> (..., tokens, feature_dim)."""
        features, log_weight = self.scaled_key_features(key, scale=scale)
        return features if log_weight is None else features * log_weight.exp().unsqueeze(-1)

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        """The exact similarity of every query with every key: (..., L, D), (..., S, D) -> (..., L, S)."""
        return self.query_features(query, scale=scale) @ self.key_features(key, scale=scale).mT

    def features_for(self, dim: int) -> int:
        """How many features a token of this dim gets."""
        raise NotImplementedError

    def features_of(self, x: Tensor) -> int:
        """How many features these tokens get: `features_for` their dim, asked in their dtype and on their device."""
        return self.features_for(x.shape[-1])

    def projection_flops(self, dim: int) -> int:
        """FLOPs of the matrix products that make the features of one token."""
        return 0

    # What the sums use ---------------------------------------------------------------------------------------------

    def scaled_query_features(self, query: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        """Features of moderate size and the logarithm (..., tokens) of the factor left out, or None for a factor 1.

        Exponential kernels override this pair instead of `query_features` and `key_features`: their features then
        never overflow, whatever the norms.
        """
        return self.query_features(query, scale=scale), None

    def scaled_key_features(self, key: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        return self.key_features(key, scale=scale), None

    # What is the same for all --------------------------------------------------------------------------------------

    @property
    def feature_dim(self) -> int:
        """Features per token. Kernels that take tokens of any dim know it once they have seen one, or by `dim=`."""
        if self.dim is None:
            name = type(self).__name__
            raise ValueError(f"{name} takes tokens of any dim: pass {name}(..., dim=) or ask features_for(dim).")
        return self.features_for(self.dim)

    def default_scale(self, dim: int) -> float:
        return dim**-0.5 if self.stands_for_softmax else 1.0

    def logit_scale(self, dim: int, scale: float | None) -> float:
        """The number that multiplies q.k: the given scale, or the default for this kind of kernel."""
        return self.default_scale(dim) if scale is None else scale

    def signature(self, scale: float | None = None) -> str:
        """Names the kernel in a State, so that a state of another kernel is refused."""
        text = f"{type(self).__name__}({self.extra_repr()})"
        return text if scale is None else f"{text} scale={scale:g}"

    def _widen(self, x: Tensor) -> Tensor:
        """Notes or checks the dim, and leaves half precision behind: sums and features are float32 at least."""
        self.check_dim(x.shape[-1])
        return x.to(compute_dtype(x.dtype))

    def check_dim(self, dim: int) -> None:
        """Refuses tokens of a dim that the weights are not made for; kernels of any dim remember the last they saw."""
        if self.dim == dim:
            return
        if self.any_dim:
            if not torch.compiler.is_compiling():  # a compiled graph may not change an attribute
                self.dim = dim
            return
        name = type(self).__name__
        raise ValueError(
            f"{name} was made for dim={self.dim}, but the tokens have dim {dim}: make one with {name}(dim={dim})."
        )


def softmax_similarity(kernel: Kernel, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """exp(scale q.k): what the softmax kernels stand for."""
    query, key = kernel._widen(query), kernel._widen(key)
    return (query @ key.mT * kernel.logit_scale(query.shape[-1], scale)).exp()
