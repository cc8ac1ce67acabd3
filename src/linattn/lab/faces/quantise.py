"""Embeddings in one byte a number: 128 bytes for a face of 128 numbers."""

import numpy as np


def to_bytes(vectors: np.ndarray) -> np.ndarray:
    """Unit rows (N, D) float as int8 (N, D), each row scaled so that its largest number is 127.

    No scale is kept: the rows had length one, and `from_bytes` gives them length one again.
    """
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0)
    return np.rint(vectors * (127 / np.maximum(largest, 1e-30))).astype(np.int8)


def from_bytes(rows: np.ndarray) -> np.ndarray:
    """int8 (N, D) as unit rows float32 (N, D)."""
    vectors = rows.astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
