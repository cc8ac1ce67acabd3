"""The same minimiser by gradient descent, with momentum and a stopping rule that bounds the error."""

import math

import numpy as np


def loss(W: np.ndarray, X: np.ndarray, lam: float) -> float:
    """|X - X W|^2 + lam |W|^2 for samples X (n, features)."""
    return float(((X - X @ W) ** 2).sum() + lam * (W**2).sum())


def descend(covariance: np.ndarray, lam: float, *, tol: float, max_iter: int) -> tuple[np.ndarray, int]:
    """W within `tol` of the minimiser in every entry, and the steps it took, from W = 0.

    Half the gradient is W (C + lam I) - C. Curvature lies between lam and the largest eigenvalue of C plus lam, which
    gives Nesterov's step and momentum; and since it is never under lam, |gradient / 2| / lam bounds the distance.
    """
    features = len(covariance)
    steepest = float(np.linalg.norm(covariance, 2)) + lam
    momentum = (math.sqrt(steepest) - math.sqrt(lam)) / (math.sqrt(steepest) + math.sqrt(lam))
    curvature = covariance + lam * np.eye(features)
    W = np.zeros((features, features))
    ahead = W
    for step in range(max_iter):
        half_gradient = ahead @ curvature - covariance
        if np.linalg.norm(half_gradient) <= tol * lam:
            return ahead, step
        new = ahead - half_gradient / steepest
        ahead = new + momentum * (new - W)
        W = new
    raise ValueError(
        f"gradient descent did not come within {tol:g} in {max_iter} steps (curvature {lam:g} to {steepest:g}): "
        "raise lam, tol or max_iter, or use solver='closed'."
    )
