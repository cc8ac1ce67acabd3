"""The linear map that keeps what data has in common and drops what it has not."""

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from .gradient_descent import descend

Array = np.ndarray


class LinearPurifier(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Learns W that minimises |X - X W|^2 + lam |W|^2 and purifies samples by x -> x W.

    W = C (C + lam I)^-1 with C = X^T X: every principal direction of the data is kept by s^2 / (s^2 + lam), with s its
    singular value. Fitted to clean samples with lam = n sigma^2, it is the best linear filter against noise of
    variance sigma^2. Data is not centred.

    >>> import numpy as np
    >>> X = np.array([[-2.17, 0.02], [1.98, -0.01], [2.41, 0.01], [-2.03, -0.02]])
    >>> LinearPurifier(lam=0.1).fit(X).matrix_.diagonal().round(2)
    array([0.99, 0.01])

    Args:
        lam: lambda > 0, the price of keeping a direction.
        solver: "closed", by an eigendecomposition, or "gradient", by descent to within `tol` of the same W.
        tol: for "gradient", the largest difference of any entry of W from the minimiser.
        max_iter: for "gradient", steps after which it gives up with an error.

    Attributes:
        covariance_: (features, features), X^T X of all samples seen; None where few samples of many features made it
            cheaper to keep the samples' own directions.
        components_: (directions, features), orthonormal.
        singular_values_: (directions,), falling.
        n_samples_seen_: how many samples were fitted.
        lam_: lambda of the last fit.
        n_iter_: steps of the descent; 1 for "closed".
    """

    def __init__(self, lam: float = 1.0, *, solver: str = "closed", tol: float = 1e-7, max_iter: int = 100_000):
        self.lam = lam
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any = None) -> "LinearPurifier":
        """Learns from samples (n, features); forgets what it knew."""
        self._check_parameters()
        X = validate_data(self, X, dtype=np.float64)
        self.n_samples_seen_ = len(X)
        if self.solver == "gradient" or len(X) >= X.shape[1]:
            return self._learn(X.T @ X)
        _, self.singular_values_, self.components_ = np.linalg.svd(X, full_matrices=False)
        self.covariance_: Array | None = None
        self._descended: Array | None = None
        self.lam_, self.n_iter_ = self.lam, 1
        return self

    def partial_fit(self, X: Any, y: Any = None) -> "LinearPurifier":
        """Adds samples (n, features) to those seen: in any portions, the same as `fit` on all of them."""
        self._check_parameters()
        first = not hasattr(self, "n_samples_seen_")
        X = validate_data(self, X, dtype=np.float64, reset=first)
        seen = np.zeros((X.shape[1], X.shape[1])) if first else self._covariance()
        self.n_samples_seen_ = len(X) + (0 if first else self.n_samples_seen_)
        return self._learn(seen + X.T @ X)

    def transform(self, X: Any) -> Array:
        """Purified samples (n, features)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        if self._descended is not None:
            return X @ self._descended
        return (X @ self.components_.T * self.shrinkage()) @ self.components_

    def shrinkage(self, lam: float | None = None) -> Array:
        """(directions,) by how much each direction is kept: s^2 / (s^2 + lam), for another lam than the fit's if given."""
        check_is_fitted(self)
        lam = self.lam_ if lam is None else lam
        return self.singular_values_**2 / (self.singular_values_**2 + lam)

    @property
    def matrix_(self) -> Array:
        """W, (features, features), symmetric."""
        check_is_fitted(self)
        if self._descended is not None:
            return self._descended
        return (self.components_.T * self.shrinkage()) @ self.components_

    def _learn(self, covariance: Array) -> "LinearPurifier":
        self.covariance_ = covariance
        values, vectors = np.linalg.eigh(covariance)
        self.singular_values_ = np.sqrt(np.maximum(values[::-1], 0))
        self.components_ = vectors.T[::-1]
        self._descended = None
        self.lam_, self.n_iter_ = self.lam, 1
        if self.solver == "gradient":
            self._descended, self.n_iter_ = descend(covariance, self.lam, tol=self.tol, max_iter=self.max_iter)
        return self

    def _covariance(self) -> Array:
        if self.covariance_ is not None:
            return self.covariance_
        scaled = self.components_ * self.singular_values_[:, None]
        return scaled.T @ scaled

    def _check_parameters(self) -> None:
        if not self.lam > 0:
            raise ValueError(f"lam must be positive, got {self.lam}.")
        if self.solver not in ("closed", "gradient"):
            raise ValueError(f"solver must be 'closed' or 'gradient', got {self.solver!r}.")
