"""What is done to a score before the softmax: a cap (Gemma 2), and biases by position (ALiBi, T5).

A cap c turns the score s = x.k into c tanh(s / c). For a slot it acts on the score of its mean key; the slot's bias, which
stands for the number and spread of its keys, is added afterwards.

Positions travel with the tokens, as further coordinates of keys and queries. So they are cut, padded, pooled and stored with
them: the position of a slot is the mean position of its keys, with their weights.

    ALiBi      k' = [k, u p_k]        x' = [x, slope / u]          x'.k' = x.k + slope p_k
    a table    k' = [k, t p_k, 0]     x' = [x, 0, t p_x]           x'.k' = x.k, and the table is read at p_k - p_x

ALiBi's bias slope (p_k - p_x) differs from slope p_k by a constant of the row, which the softmax cancels. The factors u and t
keep positions from counting as distances between keys when slots are merged.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SLOPE_UNIT = (
    2.0**-8
)  # u: positions of 10,000 tokens are 40 apart, while the spread of the queries in this direction is small
TABLE_UNIT = 2.0**-40  # t: so small that neither positions nor their spread reach any distance


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """cap tanh(scores / cap); None: no cap."""
    return scores if cap is None else (scores / cap).tanh() * cap


@dataclass(frozen=True)
class Scores:
    """How the logits of some kv heads are made of products of queries and keys.

    Attributes:
        cap: of the scores, or None.
        table: (H, G, 2 n + 1), added to the capped score of a key at the relative position -n .. n; the ends also stand for
            everything farther. None: no bias.
    """

    cap: float | None = None
    table: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if logits are the scores themselves."""
        return self.cap is None and self.table is None

    def of_heads(self, heads: list[int]) -> "Scores":
        """Of some of the kv heads."""
        return self if self.table is None else Scores(self.cap, self.table[heads])

    def logits(self, query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
        """(B, H, G L, D), (B, H, n, D) -> (B, H, G L, n). bias: (B, H, n), of slots."""
        if self.plain and bias is not None:
            rows = bias.flatten(0, 1).unsqueeze(1)
            return torch.baddbmm(rows, query.flatten(0, 1), key.flatten(0, 1).mT).unflatten(0, query.shape[:2])
        logits = capped(query @ key.mT, self.cap)
        if self.table is not None:
            logits = logits + self.by_position(query, key)
        return logits if bias is None else logits + bias.unsqueeze(2)

    def by_position(self, query: Tensor, key: Tensor) -> Tensor:
        """The biases (B, H, .., G L, n) of the table for queries (B, H, .., G L, D) and keys (B, H, .., n, D)."""
        assert self.table is not None
        H, G, width = self.table.shape
        reach, extra = width // 2, query.dim() - 4
        at = (query[..., -1:] / TABLE_UNIT).round().long()
        relative = (key[..., -2].unsqueeze(-2) / TABLE_UNIT).round().long() - at
        first = (torch.arange(H * G, device=key.device) * width).reshape(H, *[1] * extra, G, 1, 1)
        index = relative.clamp_(-reach, reach).add_(reach).unflatten(-2, (G, -1)) + first
        return self.table.flatten()[index].flatten(-3, -2)


PLAIN = Scores()
