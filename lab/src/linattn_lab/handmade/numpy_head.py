"""One attention head as its definition reads: NumPy, one loop per sum, every intermediate kept."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Weights:
    """The weights of one layer with one head; no residual, norm, MLP or mask.

    Attributes:
        Km, Qm: (d_in + d_pos, d_qk).
        Vm: (d_in + d_pos, d_v).
        pos: (max_len, d_start), concatenated to the token by its place counted from the start; None for no positions.
        pos_end: (max_len, d_end), likewise counted from the end; d_pos = d_start + d_end.
    """

    Km: Array
    Qm: Array
    Vm: Array
    pos: Array | None = None
    pos_end: Array | None = None

    def __post_init__(self) -> None:
        if self.Km.shape != self.Qm.shape or self.Km.shape[0] != self.Vm.shape[0]:
            raise ValueError(
                f"Km and Qm must have one shape and Vm as many rows, "
                f"got {self.Km.shape}, {self.Qm.shape}, {self.Vm.shape}."
            )
        if self.max_len is not None and any(p is not None and len(p) != self.max_len for p in (self.pos, self.pos_end)):
            raise ValueError("pos and pos_end must be for the same max_len.")

    @property
    def max_len(self) -> int | None:
        """The longest sequence that has positions; None without positions."""
        table = self.pos if self.pos is not None else self.pos_end
        return None if table is None else len(table)

    def with_plain_positions(self) -> "Weights":
        """The same head with one-hot positions: what it does with place i is then row i of its matrices."""
        tables = [table for table in (self.pos, self.pos_end) if table is not None]
        d_in = len(self.Km) - sum(table.shape[1] for table in tables)

        def fold(matrix: Array) -> Array:
            rows, start = [matrix[:d_in]], d_in
            for table in tables:
                rows.append(table @ matrix[start : start + table.shape[1]])
                start += table.shape[1]
            return np.concatenate(rows)

        plain = [None if table is None else np.eye(len(table)) for table in (self.pos, self.pos_end)]
        return Weights(fold(self.Km), fold(self.Qm), fold(self.Vm), *plain)


@dataclass(frozen=True)
class Trace:
    """The eight variables of one sequence of n tokens.

    Three weights, three projections (n, d_qk) and (n, d_v), the attention (n, n) and the output (n, d_v).
    """

    Km: Array
    Qm: Array
    Vm: Array
    K: Array
    Q: Array
    V: Array
    attention: Array
    output: Array

    def items(self) -> list[tuple[str, Array]]:
        return [(f.name, getattr(self, f.name)) for f in fields(self)]


def with_positions(tokens: Array, weights: Weights) -> Array:
    """(n, d_in) -> (n, d_in + d_pos)."""
    n = len(tokens)
    if weights.max_len is not None and n > weights.max_len:
        raise ValueError(f"positions are known for {weights.max_len} tokens, got {n}.")
    parts = [tokens]
    if weights.pos is not None:
        parts.append(weights.pos[:n])
    if weights.pos_end is not None:
        parts.append(weights.pos_end[:n][::-1])
    return np.concatenate(parts, axis=1)


def single_head(tokens: Array, weights: Weights) -> Trace:
    """softmax(Q K^T / sqrt(d_qk)) V for one sequence (n, d_in), written to be read."""
    x = with_positions(tokens, weights)  # (n, d_in + d_pos)
    Q, K, V = x @ weights.Qm, x @ weights.Km, x @ weights.Vm
    n, d_qk = Q.shape
    attention = np.zeros((n, n))
    output = np.zeros((n, V.shape[1]))
    for i in range(n):
        scores = np.array([Q[i] @ K[j] for j in range(n)]) / np.sqrt(d_qk)
        shares = np.exp(scores - scores.max())
        attention[i] = shares / shares.sum()
        for j in range(n):
            output[i] += attention[i, j] * V[j]
    return Trace(weights.Km, weights.Qm, weights.Vm, K, Q, V, attention, output)
