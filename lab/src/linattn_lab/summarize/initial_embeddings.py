"""A start for the weights that counting can give: which tokens keep the same company, and which are frequent."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

WINDOW = 4
SMOOTHING = 0.75  # of the counts of contexts: rare contexts would look too telling


def from_company(texts: Sequence[Sequence[int]], vocabulary: int, dim: int, seed: int = 0) -> Tensor:
    """Vectors (vocabulary, dim) of length 1 from the singular vectors of positive pointwise mutual information.

    Levy and Goldberg (2014) showed that word2vec factors much the same matrix; this takes seconds. Tokens without
    company get random directions.
    """
    tokens = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts if len(text)])
    owner = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    counts = sparse.csr_matrix((vocabulary, vocabulary), dtype=np.float64)
    for distance in range(1, WINDOW + 1):
        together = owner[distance:] == owner[:-distance]
        pair = (tokens[:-distance][together], tokens[distance:][together])
        counts += sparse.csr_matrix((np.ones(len(pair[0])), pair), shape=counts.shape)
    counts = (counts + counts.T).tocoo()
    row, column = (np.asarray(counts.sum(axis)).ravel() for axis in (1, 0))
    column = column**SMOOTHING * column.sum() / max(1e-9, (column**SMOOTHING).sum())
    information = np.log(counts.data * row.sum() / (row[counts.row] * column[counts.col]))
    kept = information > 0
    matrix = sparse.csr_matrix(
        (information[kept], (counts.row[kept], counts.col[kept])), shape=counts.shape, dtype=np.float32
    )
    vectors, values, _ = randomized_svd(matrix, dim, n_iter=2, random_state=seed)
    found = torch.from_numpy(vectors * np.sqrt(values)).float()
    found = found - found.mean(0)
    found = found + 1e-3 * torch.randn(found.shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(found, dim=-1)


def log_frequency(texts: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """log p (vocabulary,) of each token, one added to every count."""
    counts = np.ones(vocabulary)
    for text in texts:
        np.add.at(counts, np.asarray(text, dtype=np.int64), 1)
    return torch.from_numpy(np.log(counts / counts.sum())).float()
