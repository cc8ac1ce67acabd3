"""Necessary FLOPs: N tokens of H heads, D = dim, M = value dim, r features. What a causal block wastes is not counted."""


def forward(heads: int, tokens: int, dim: int, value_dim: int, features: int) -> int:
    """Two projections, phi(K)' V and phi(Q) S; the causal form needs no more."""
    return heads * tokens * features * (4 * dim + 4 * value_dim)


def both(heads: int, tokens: int, dim: int, value_dim: int, features: int, *, again: bool = True) -> int:
    """Forward and backward. Backward: both projections (4 D r) and four products with S, dS, V and dO (8 r M).

    `again` adds what must be computed a second time because nothing of size tokens x features may be kept: the
    features of queries and keys (4 D r) and the sums (2 r M).
    """
    backward = 4 * dim + 8 * value_dim + (4 * dim + 2 * value_dim if again else 0)
    return forward(heads, tokens, dim, value_dim, features) + heads * tokens * features * backward


CHUNK = 64  # tokens of a chunk in the counts below


def decayed_sums(heads: int, tokens: int, dim: int, value_dim: int) -> int:
    """Pairs within a chunk (half of them: C D + C M), the state read (2 D M) and the keys added (2 D M)."""
    return heads * tokens * (CHUNK * (dim + value_dim) + 4 * dim * value_dim)


def delta_rule(heads: int, tokens: int, dim: int, value_dim: int) -> int:
    """Both score matrices and both triangular products (2 C D + 2 C M), and K S, Q S and K' U (6 D M)."""
    return heads * tokens * (2 * CHUNK * (dim + value_dim) + 6 * dim * value_dim)
