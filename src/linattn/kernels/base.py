"""The base class of all kernels: a similarity of queries and keys that factors into features."""

from typing import Any

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _is_tracing, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import FakeTensor

from ._constants import ConstantBuffers
from .native_form import NativeForm


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that features and sums are computed in: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Modes that record the operators of torch, or run them without numbers: fake tensors, make_fx, functionalisation.
_RECORDERS = tuple(getattr(_TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def is_recorded() -> bool:
    """True while torch records its operators or imitates them: what reads or writes memory behind its back would be missing
    from a graph of make_fx or torch.jit.trace, and tensors made meanwhile may have no memory."""
    if _is_tracing():
        return True
    if not _len_torch_dispatch_stack():
        return False
    return any(_get_dispatch_mode(mode) is not None for mode in _RECORDERS)


def is_plain(*tensors: Tensor) -> bool:
    """True if values can be read without a graph break, a functorch transform or a device sync."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or is_recorded():
        return False
    return all(x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in tensors)


# Methods that define a feature map: a subclass that overrides one loses the inherited native form.
_FEATURE_METHODS = (
    "phi",
    "query_features",
    "key_features",
    "scaled_query_features",
    "scaled_key_features",
    "features_for",
    "native_inputs",
)


class Kernel(ConstantBuffers):
    """A similarity sim(q, k) = phi_q(q) . phi_k(k), so that attention with it is linear in the number of tokens.

    A subclass defines `query_features`, `key_features`, `features_for` and, if it approximates another similarity,
    `similarity`. Layout is (..., heads, tokens, dim).

    Attributes:
        stands_for_softmax: the kernel approximates softmax: `scale=None` means 1/sqrt(dim), as in torch; otherwise 1.
        positive: the similarity is never negative, so denominators are positive.
        any_dim: the kernel has no weights that depend on dim and accepts any.
        only_parameters: the features depend only on the tokens, the parameters and constants. If False (other tensors with
            gradients are involved), torch's checkpointing differentiates the kernel.
    """

    stands_for_softmax: bool = False
    positive: bool = True
    any_dim: bool = False
    only_parameters: bool = False
    has_features: bool = True  # False: attention with it is not made of sums of features (softmax, near/far)
    changes: int = 0  # counts attribute assignments, to invalidate cached plans

    def __init__(self, dim: int | None = None):
        super().__init__()
        if dim is not None and dim < 1:
            raise ValueError(f"{type(self).__name__}: dim must be at least 1, got {dim}.")
        self.dim = dim

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass that overrides the features without a native form of its own has none."""
        super().__init_subclass__(**options)
        own = cls.__dict__
        if "native_form" not in own and any(name in own for name in _FEATURE_METHODS):
            cls.native_form = Kernel.native_form  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__["changes"] = self.changes + 1

    # Overridden by subclasses ------------------------------------------------------------------------------------------

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
        """Number of features for tokens of this dim."""
        raise NotImplementedError

    def features_of(self, x: Tensor) -> int:
        """Number of features for these tokens; like `features_for`, but evaluated in their dtype and on their device."""
        return self.features_for(x.shape[-1])

    def projection_flops(self, dim: int) -> int:
        """FLOPs of the matrix products that compute the features of one token."""
        return 0

    # Used by the engines ---------------------------------------------------------------------------------------------

    def scaled_query_features(self, query: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        """Features in a safe range and the logarithm (..., tokens) of the factor taken out, or None for a factor of 1.

        Exponential kernels override these two methods instead of `query_features` and `key_features`, so that their
        features never overflow.
        """
        return self.query_features(query, scale=scale), None

    def scaled_key_features(self, key: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        """As `scaled_query_features`, for keys."""
        return self.key_features(key, scale=scale), None

    # Used by the native engine ------------------------------------------------------------------------------------

    def native_form(self, dim: int, scale: float | None) -> NativeForm | None:
        """Description of the feature map for the native engine; None: torch computes the features, only the sums are native."""
        return None

    def native_inputs(self, x: Tensor, scale: float | None, *, is_key: bool) -> tuple[Tensor, Tensor | None]:
        """Preprocessing in torch if the native form is `prepared`: the transformed tokens, and the log-weight (..., tokens) of
        the keys that the map leaves out."""
        return x, None

    @property
    def log_weighted(self) -> bool:
        """Whether features come with a log-weight, so that exponentials never overflow."""
        return type(self).scaled_key_features is not Kernel.scaled_key_features

    # Common to all kernels --------------------------------------------------------------------------------------

    @property
    def feature_dim(self) -> int:
        """Features per token. Kernels for any dim know it from `dim=` or from the first tokens they saw."""
        if self.dim is None:
            name = type(self).__name__
            raise ValueError(f"{name} takes tokens of any dim: pass {name}(..., dim=) or ask features_for(dim).")
        return self.features_for(self.dim)

    def default_scale(self, dim: int) -> float:
        """The factor of q.k for `scale=None`."""
        return dim**-0.5 if self.stands_for_softmax else 1.0

    def logit_scale(self, dim: int, scale: float | None) -> float:
        """The factor of q.k: `scale`, or the kernel's default."""
        return self.default_scale(dim) if scale is None else scale

    def signature(self, scale: float | None = None, dim: int | None = None) -> str:
        """Identifies the kernel in a State, so that states of other kernels are refused.

        dim: of the tokens, for kernels whose features have the same shape for any dim.
        """
        text = f"{type(self).__name__}({self.extra_repr()})"
        return text if scale is None else f"{text} scale={scale:g}"

    def widen(self, x: Tensor) -> Tensor:
        """Checks the dim and widens half precision: features and sums are at least float32."""
        self.check_dim(x.shape[-1])
        return x.to(compute_dtype(x.dtype))

    def check_dim(self, dim: int) -> None:
        """Refuses tokens of a dim that the weights do not fit."""
        if self.dim == dim:
            return
        if self.any_dim:
            if self.dim is None and not torch.compiler.is_compiling():  # a compiled graph may not change an attribute
                self.__dict__["dim"] = dim  # for `feature_dim`; nothing else depends on it
            return
        name = type(self).__name__
        raise ValueError(
            f"{name} was made for dim={self.dim}, but the tokens have dim {dim}: make one with {name}(dim={dim})."
        )


def softmax_similarity(kernel: Kernel, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """exp(scale q.k), which the softmax kernels approximate."""
    query, key = kernel.widen(query), kernel.widen(key)
    return (query @ key.mT * kernel.logit_scale(query.shape[-1], scale)).exp()
