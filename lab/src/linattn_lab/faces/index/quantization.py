"""Embeddings in few bits a number: 128 bytes for a face of 128 numbers of 8 bits, as in the paper."""

import numpy as np

# Where the largest numbers are cut off, in units of 1 / sqrt(D): with few levels that is better than room for them.
REACH = {4: 2.6, 2: 1.2}


def to_bytes(vectors: np.ndarray, bits: int = 8) -> np.ndarray:
    """Unit rows (N, D) float as whole numbers of 8, 4, 2 or 1 bits, int8 (N, D), each row by a scale of its own.

    No scale is kept: the rows had length one, and `from_bytes` gives them length one again. Of one bit is the sign.
    """
    if bits not in (8, 4, 2, 1):
        raise ValueError(f"bits must be 8, 4, 2 or 1, got {bits}.")
    if bits == 1:
        return np.where(vectors < 0, -1, 1).astype(np.int8)
    top = 2 ** (bits - 1) - 1
    reach = np.abs(vectors).max(axis=1, keepdims=True, initial=0)
    if bits in REACH:
        reach = np.minimum(reach, REACH[bits] / np.sqrt(vectors.shape[1]))
    return np.rint(np.clip(vectors / np.maximum(reach, 1e-30), -1, 1) * top).astype(np.int8)


def from_bytes(rows: np.ndarray) -> np.ndarray:
    """int8 (N, D) as unit rows float32 (N, D)."""
    vectors = rows.astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
