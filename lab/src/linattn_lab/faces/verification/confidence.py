"""Confidence of a verification, calibrated on distances of pairs that were not used in training."""

from dataclasses import dataclass
from typing import Any

import numpy as np

# Finer towards the ends, where false accepts and misses are counted.
TAIL = np.array([0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03])
SHARES = np.concatenate([TAIL, np.arange(0.05, 0.951, 0.05), 1 - TAIL[::-1]])


def calibrate(same: np.ndarray, different: np.ndarray) -> dict[str, Any]:
    """What `Sureness` needs, ready for JSON, from squared distances of pairs of one person and of different people."""
    from sklearn.linear_model import LogisticRegression

    if len(same) == 0 or len(different) == 0:
        raise ValueError(
            f"calibration needs pairs of one person and of different people, got {len(same)} and {len(different)}: "
            "at least two people, one of them with two pictures."
        )
    distances = np.concatenate([same, different]).astype(np.float64)
    truth = np.repeat([1, 0], [len(same), len(different)])
    # Weighted so that both kinds count alike: the odds before looking are even.
    fit = LogisticRegression(C=100.0, class_weight="balanced").fit(distances[:, None], truth)
    return {
        "slope": min(float(fit.coef_[0, 0]), 0.0),
        "offset": float(fit.intercept_[0]),
        "shares": SHARES.tolist(),
        "same": np.quantile(same, SHARES).tolist(),
        "different": np.quantile(different, SHARES).tolist(),
        "pairs": [len(same), len(different)],
    }


@dataclass(frozen=True)
class Sureness:
    """What a squared distance says, by a calibration."""

    probability: float  # that it is one person, if both were equally likely before
    missed: float  # share of pairs of one person that are farther apart
    mistaken: float  # share of pairs of different people that are as near

    @classmethod
    def of(cls, distance: float, calibration: dict[str, Any]) -> "Sureness":
        score = calibration["slope"] * distance + calibration["offset"]
        shares = calibration["shares"]
        return cls(
            probability=float(1 / (1 + np.exp(-np.clip(score, -50, 50)))),
            missed=1 - float(np.interp(distance, calibration["same"], shares, left=0, right=1)),
            mistaken=float(np.interp(distance, calibration["different"], shares, left=0, right=1)),
        )
