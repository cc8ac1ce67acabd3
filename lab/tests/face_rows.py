"""Unit vectors and faces for tests of the index."""

import numpy as np

from linattn_lab.faces.index import Face

DIM = 32


def unit(count, dim=DIM, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def faces(count, start=0, person=None):
    return [Face(f"/nowhere/{i}.png", person, f"{i:064x}") for i in range(start, start + count)]
