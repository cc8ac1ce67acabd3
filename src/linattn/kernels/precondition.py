"""Exact variance reduction for kernels that approximate softmax.

Three transformations leave exp(x.y) unchanged and reduce the variance of its features: subtracting one vector from all keys
(a factor per query), one from all queries (a factor per key), and x A^-T, y A for an invertible A.
"""

import hashlib
import math
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ._constants import ConstantBuffers
from .base import Kernel, compute_dtype


class Precondition(ConstantBuffers):
    """Centres queries and keys and balances their covariances, from statistics given beforehand.

    The statistics are constants, independent of the sequence, so causality is preserved.

    >>> import torch, linattn
    >>> q, k = torch.randn(1, 2, 256, 16) + 2, torch.randn(1, 2, 256, 16) - 1
    >>> kernel = linattn.kernels.Positive(16, precondition=linattn.kernels.Precondition.from_samples(q, k))

    Args:
        query_mean, key_mean: (dim,) or (kv_heads, dim).
        query_covariance, key_covariance: (..., dim, dim), both or neither; together they give the balance A.
    """

    _digest: str = ""

    def __init__(
        self,
        query_mean: Tensor,
        key_mean: Tensor,
        query_covariance: Tensor | None = None,
        key_covariance: Tensor | None = None,
    ):
        super().__init__()
        if (query_covariance is None) != (key_covariance is None):
            raise ValueError("Precondition: give both covariances, or neither.")
        if query_mean.shape != key_mean.shape or query_mean.dim() not in (1, 2):
            raise ValueError(
                "Precondition: query_mean and key_mean must both be (dim,) or (kv_heads, dim), "
                f"got {tuple(query_mean.shape)} and {tuple(key_mean.shape)}."
            )
        self.register_buffer("query_mean", query_mean.detach().clone())
        self.register_buffer("key_mean", key_mean.detach().clone())
        self.query_mean: Tensor
        self.key_mean: Tensor
        self.key_map: Tensor | None
        self.query_map: Tensor | None
        key_map = query_map = None
        if query_covariance is not None and key_covariance is not None:
            key_map, query_map = balance(query_covariance, key_covariance)
        self.register_buffer("key_map", key_map)  # A
        self.register_buffer("query_map", query_map)  # A^-T
        self.digest()
        self.register_load_state_dict_post_hook(_read_again)

    @classmethod
    def from_samples(
        cls, query: Tensor, key: Tensor, *, per_head: bool = False, balanced: bool = True
    ) -> "Precondition":
        """Statistics of sample queries and keys (..., heads, tokens, dim), over everything or for each kv head."""
        heads = key.shape[-3] if per_head else 1
        query_rows, key_rows = (_rows(x, heads) for x in (query.detach(), key.detach()))  # (heads, n, dim)
        means = [x.mean(1) if per_head else x.mean(1)[0] for x in (query_rows, key_rows)]
        if not balanced:
            return cls(*means)
        covariances = [_covariance(x) if per_head else _covariance(x)[0] for x in (query_rows, key_rows)]
        return cls(*means, *covariances)

    def digest(self) -> str:
        """Eight hexadecimal digits of the statistics, worked out again when they change.

        In a compiled graph or under torch.func, where they cannot be read, it is the digest of the last look."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self._digest
        tensors = {name: x for name, x in self._buffers.items() if x is not None}
        if any(type(x) is not Tensor or x.is_meta for x in tensors.values()):
            return self._digest
        now = [(x, 0 if x.is_inference() else x._version) for x in tensors.values()]  # noqa: SLF001
        before = _LAST_LOOKS.get(self, [])
        if len(now) != len(before) or any(x is not y or i != j for (x, i), (y, j) in zip(now, before, strict=True)):
            found = hashlib.blake2b(digest_size=4)
            for name, x in tensors.items():
                found.update(f"{name} {tuple(x.shape)}".encode())
                found.update(x.detach().resolve_neg().to("cpu", torch.float32).numpy().tobytes())
            self._digest, _LAST_LOOKS[self] = found.hexdigest(), now
        return self._digest

    def query(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """The changed query and the summand of its log-similarities that no key shares: q . key_mean."""
        query_mean, key_mean = (self._per_head(m, query) for m in (self.query_mean, self.key_mean))
        changed = query - query_mean
        if self.query_map is not None:
            changed = changed @ self._per_head(self.query_map, query, rows=True)
        return changed, (query * key_mean).sum(-1)

    def key(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The changed key and the summand of its log-similarities that no query shares: query_mean . (k - key_mean)."""
        query_mean, key_mean = (self._per_head(m, key) for m in (self.query_mean, self.key_mean))
        centred = key - key_mean
        changed = centred if self.key_map is None else centred @ self._per_head(self.key_map, key, rows=True)
        return changed, (centred * query_mean).sum(-1)

    def _per_head(self, statistic: Tensor, x: Tensor, rows: bool = False) -> Tensor:
        """Brings (heads, dim) or (heads, dim, dim) to the heads of x; the query heads of a group share theirs."""
        statistic = statistic.to(x)
        if self.query_mean.dim() == 1:
            return statistic
        heads = statistic.shape[0]
        if x.dim() < 3 or x.shape[-3] % heads:
            raise ValueError(
                f"Precondition has statistics of {heads} kv heads; tokens of shape {tuple(x.shape)} do not."
            )
        statistic = statistic.repeat_interleave(x.shape[-3] // heads, 0)
        return statistic if rows else statistic.unsqueeze(-2)

    def extra_repr(self) -> str:
        return f"shape={tuple(self.query_mean.shape)}, balanced={self.key_map is not None}"


# The tensors of a precondition when its digest was worked out, and how often each had been changed.
_LAST_LOOKS: WeakKeyDictionary[Precondition, list[tuple[Tensor, int]]] = WeakKeyDictionary()


def _read_again(precondition: Precondition, _: object) -> None:
    precondition.digest()


def named(precondition: Precondition | None) -> list[str]:
    """How a kernel names its precondition, in states among others."""
    return [] if precondition is None else [f"precondition={precondition.digest()}"]


def prepare_query(
    kernel: Kernel, query: Tensor, scale: float | None, precondition: Precondition | None
) -> tuple[Tensor, Tensor | None]:
    """sqrt(scale) q, preconditioned where asked for, with the log-factor that this leaves out."""
    return _prepare(kernel, query, scale, None if precondition is None else precondition.query)


def prepare_key(
    kernel: Kernel, key: Tensor, scale: float | None, precondition: Precondition | None
) -> tuple[Tensor, Tensor | None]:
    """sqrt(scale) k, preconditioned where asked for, with the log-factor that this leaves out."""
    return _prepare(kernel, key, scale, None if precondition is None else precondition.key)


def _prepare(
    kernel: Kernel, x: Tensor, scale: float | None, change: Callable[[Tensor], tuple[Tensor, Tensor]] | None
) -> tuple[Tensor, Tensor | None]:
    x = kernel.widen(x)
    root = math.sqrt(kernel.logit_scale(x.shape[-1], scale))
    if change is None:
        return x * root, None
    changed, shift = change(x)
    return changed * root, shift * root**2


def balance(query_covariance: Tensor, key_covariance: Tensor) -> tuple[Tensor, Tensor]:
    """A and A^-T such that y A and x A^-T have one and the same, diagonal covariance."""
    dim = query_covariance.shape[-1]
    eye = torch.eye(dim, dtype=torch.float64, device=query_covariance.device)
    query_cov, key_cov = (c.double() for c in (query_covariance, key_covariance))
    query_cov, key_cov = (
        c + 1e-6 * c.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-12) * eye
        for c in (query_cov, key_cov)
    )
    values, vectors = torch.linalg.eigh(query_cov)
    root = vectors * values.sqrt().unsqueeze(-2) @ vectors.mT
    inverse_root = vectors * values.rsqrt().unsqueeze(-2) @ vectors.mT
    spectrum, basis = torch.linalg.eigh(root @ key_cov @ root)
    quarter = spectrum.clamp_min(1e-30).pow(0.25).unsqueeze(-2)
    key_map = root @ basis / quarter
    query_map = inverse_root @ basis * quarter
    return key_map.to(compute_dtype(query_covariance.dtype)), query_map.to(compute_dtype(query_covariance.dtype))


def _rows(x: Tensor, heads: int) -> Tensor:
    """(..., heads * g, tokens, dim) -> (heads, rows, dim), in float64."""
    x = x.double()
    grouped = x.reshape(-1, heads, x.shape[-3] // heads, *x.shape[-2:]) if heads > 1 else x[None, None]
    return grouped.movedim(1, 0).reshape(heads, -1, x.shape[-1])


def _covariance(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(1, keepdim=True)
    return (centred.mT @ centred / max(rows.shape[1], 1)).float()
