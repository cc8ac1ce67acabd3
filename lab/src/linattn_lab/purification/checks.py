"""The closed form against scikit-learn's Ridge and against gradient descent, on real pictures."""

import numpy as np
from sklearn.linear_model import Ridge

from .purifier import LinearPurifier

SIDE = 14  # pixels; images are averaged down to about this, so that descent takes seconds


def against_twins(lam: float, images: np.ndarray) -> tuple[float, float, int]:
    """Largest differences of W from Ridge's and from the descent's, and the descent's steps; images (n, h, w)."""
    X = _shrink(images)
    lam = lam * X.shape[1] / images[0].size  # as much against the signal as on whole images
    W = LinearPurifier(lam).fit(X).matrix_
    ridge = Ridge(alpha=lam, fit_intercept=False, solver="svd").fit(X, X).coef_
    descent = LinearPurifier(lam, solver="gradient").fit(X)
    return float(np.abs(W - ridge).max()), float(np.abs(W - descent.matrix_).max()), descent.n_iter_


def _shrink(images: np.ndarray) -> np.ndarray:
    """(n, about SIDE^2): means of squares of pixels."""
    step = max(1, images.shape[1] // SIDE)
    height, width = (size // step for size in images.shape[1:])
    blocks = images[:, : height * step, : width * step].reshape(len(images), height, step, width, step)
    return blocks.mean((2, 4)).reshape(len(images), -1)
