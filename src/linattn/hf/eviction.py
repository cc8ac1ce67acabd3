"""Baselines: bounded caches that drop keys, as their papers define the choice, in the streaming protocol of near/far.

Tokens are read in blocks. The queries of a block attend to the keys that are kept and to their own block; then keys are dropped
until each head has as many as its budget. These rules serve comparisons (`linattn fidelity --baselines`): they are computed by
plain torch and only for causal calls without padding.

| name | keeps, besides the first `sinks` and the last `recent` tokens | paper |
| --- | --- | --- |
| streaming | nothing: the window is as long as the budget allows | StreamingLLM, Xiao et al. 2023 |
| h2o | the largest sums of attention received so far | H2O, Zhang et al. 2023 |
| tova | the most attended by the last query, over heads of equal budgets; nothing else is protected | TOVA, Oren et al. 2024 |
| snapkv | the most attended by the queries of the last block, smoothed over 5 positions | SnapKV, Li et al. 2024 |
| knorm | the keys with the smallest norm | Devoto et al. 2024 |
| keydiff | the keys least similar to the mean direction of all keys | KeyDiff, Park et al. 2025 |
| expected | the most attention expected of queries to come, by the norm of the value | Expected Attention, Devoto et al. 2025 |

PyramidKV and DuoAttention are budgets for these rules: see `baselines.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, cosine_similarity, normalize

from ..kernels.base import Kernel
from ..nearfar.entry_codes import decode, encode
from ..states.base import State
from ..states.layout import Spec
from . import expected_attention

RULES = ("streaming", "h2o", "tova", "snapkv", "knorm", "keydiff", "expected")
POOLED = 5  # positions over which SnapKV smooths attention


@dataclass(eq=False, repr=False)
class EvictionState(State):
    """The keys that are kept, with their values, as near/far stores them (nearfar.entry_codes), one head after the other.

    Attributes:
        entries: (B, C, W), a key beside its value, of all heads.
        position, received: (B, C), and the attention received; of the current block only under `snapkv`.
        query_sums: (B, H, Q), what the rule `expected` knows of the queries so far; Q = 0 for the others.
    """

    entries: Tensor
    position: Tensor
    received: Tensor
    query_sums: Tensor
    tokens: Tensor

    form: ClassVar[str] = "eviction"
    table: ClassVar[dict[str, Spec]] = {
        "entries": Spec(("C", "W"), "entry"),
        "position": Spec(("C",), "count"),
        "received": Spec(("C",), "statistic"),
        "query_sums": Spec(("H", "Q"), "statistic"),
        "tokens": Spec((), "count"),
    }


class Eviction(Kernel):
    """Exact attention to a bounded number of keys; see the table above. For `attach`, and for comparisons only."""

    stands_for_softmax = True
    has_features = False
    any_dim = True

    def __init__(
        self,
        rule: str,
        budget: int | Sequence[int],
        *,
        recent: int = 128,
        sinks: int = 4,
        block: int = 64,
        bits: int = 32,
        frequencies: Tensor | None = None,
    ):
        """budget: keys that each kv head keeps, or one number for all.

        bits: of the keys and values that are kept: 32, 16 or 8, as in NearFar(state_bits=..). frequencies: (D / 2,), of the
        rotation of queries and keys by their positions; `expected` needs them.
        """
        super().__init__(None)
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}: the rules are {', '.join(RULES)}.")
        self.budget = budget if isinstance(budget, int) else tuple(budget)
        least = min(self.budgets(1))
        if least < sinks + 1:
            raise ValueError(f"a budget of {least} keys leaves no room beside {sinks} sinks.")
        if rule == "expected" and frequencies is None:
            raise ValueError("the rule 'expected' needs a model with plain rotary positions: give their frequencies.")
        self.rule, self.recent, self.sinks, self.block = rule, recent, sinks, block
        self.bits = bits
        self.frequencies = frequencies if rule == "expected" else None

    def budgets(self, heads: int) -> tuple[int, ...]:
        """Keys that each kv head keeps."""
        return (self.budget,) * heads if isinstance(self.budget, int) else self.budget

    def features_for(self, dim: int) -> int:
        raise ValueError("a cache that drops keys has no features.")

    def extra_repr(self) -> str:
        return f"{self.rule}, budget={self.budget}, recent={self.recent}, sinks={self.sinks}, block={self.block}" + (
            f", bits={self.bits}" if self.bits < 32 else ""
        )

    @torch.no_grad()
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, state: EvictionState | None, scale: float | None
    ) -> tuple[Tensor, EvictionState]:
        """(B, Hq, L, D), (B, H, L, D), (B, H, L, M) -> (B, Hq, L, M), and the keys that are kept afterwards."""
        B, H, L, D = key.shape
        if len(self.budgets(H)) != H:
            raise ValueError(f"budgets of {len(self.budgets(H))} kv heads do not fit {H} of them.")
        tokens = 0 if state is None else int(state.tokens[0])
        groups = self._empty(query, key, value) if state is None else self._split(state, H)
        rows = query.new_empty(B, H, query.shape[1] // H, L, value.shape[-1])
        for heads, held in groups.items():
            own = [x[:, list(heads)] for x in (query.unflatten(1, (H, -1)), key, value)]
            budget = self.budgets(H)[heads[0]]
            for cut in self._blocks(tokens, L):
                q, k, v = (x[..., cut, :] for x in own)
                out, held = self._block(q, k, v, held, tokens + cut.start, scale or D**-0.5, budget)
                rows[:, list(heads), :, cut] = out
            groups[heads] = held
        return rows.flatten(1, 2), self._join(groups, B, tokens + L)

    def _blocks(self, tokens: int, length: int) -> Iterator[slice]:
        """The parts of `length` further tokens that lie in one block each."""
        start = 0
        while start < length:
            end = min(length, start + self.block - (tokens + start) % self.block)
            yield slice(start, end)
            start = end

    def _empty(self, query: Tensor, key: Tensor, value: Tensor) -> "dict[tuple[int, ...], _Held]":
        B, H = key.shape[:2]
        sums = expected_attention.no_sums(query, H) if self.rule == "expected" else key.new_zeros(B, H, 0)
        none = torch.zeros(B, H, 0, dtype=torch.int64, device=key.device)
        entries = torch.cat([key, value], -1)[:, :, :0]
        held = _Held(encode(entries, key.shape[-1], self.bits), none, key.new_zeros(B, H, 0), sums)
        return {heads: held.of(heads) for heads in self._groups(H)}

    def _groups(self, heads: int) -> list[tuple[int, ...]]:
        """The heads of equal budgets."""
        budgets = self.budgets(heads)
        return [tuple(h for h in range(heads) if budgets[h] == keys) for keys in sorted(set(budgets))]

    def _split(self, state: EvictionState, heads: int) -> "dict[tuple[int, ...], _Held]":
        """By heads of equal budgets, which hold equally many keys."""
        tokens = int(state.tokens[0])
        full, rest = tokens // self.block * self.block, tokens % self.block
        sizes = [min(full, keys) + rest for keys in self.budgets(heads)]
        parts = [x.split(sizes, 1) for x in (state.entries, state.position, state.received)]
        groups = {}
        for group in self._groups(heads):
            entries, position, received = (torch.stack([part[h] for h in group], 1) for part in parts)
            groups[group] = _Held(entries, position, received, state.query_sums[:, list(group)])
        return groups

    def _join(self, groups: "dict[tuple[int, ...], _Held]", batch: int, tokens: int) -> EvictionState:
        """The inverse of `_split`."""
        owner = {h: (held, i) for heads, held in groups.items() for i, h in enumerate(heads)}
        ordered = [owner[h] for h in sorted(owner)]
        fields = {
            name: torch.cat([getattr(held, name)[:, i] for held, i in ordered], 1)
            for name in ("entries", "position", "received")
        }
        sums = torch.stack([held.query_sums[:, i] for held, i in ordered], 1)
        count = torch.full((batch,), tokens, dtype=torch.int64, device=sums.device)
        return EvictionState(self.rule, **fields, query_sums=sums, tokens=count)

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, held: "_Held", start: int, scale: float, budget: int
    ) -> tuple[Tensor, "_Held"]:
        """Tokens (B, H, G, n, D), (B, H, n, D), (B, H, n, M) inside one block; keys are dropped at its end."""
        B, H, n, D = key.shape
        position = torch.arange(start, start + n, device=key.device).expand(B, H, n)
        entries = torch.cat([decode(held.entries, D, key.dtype), torch.cat([key, value], -1)], 2)
        keys, values = entries[..., :D], entries[..., D:]
        positions = torch.cat([held.position, position], 2)
        logits = (query @ keys.unsqueeze(2).mT) * scale
        later = positions[:, :, None, None, :] > position[:, :, None, :, None]
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)  # (B, H, G, n, keys)
        out = weights @ values.unsqueeze(2)
        before = held.received * 0 if self.rule == "snapkv" and start % self.block == 0 else held.received
        received = torch.cat([before, before.new_zeros(B, H, n)], 2) + weights.sum(3).mean(2)
        sums = held.query_sums
        if self.frequencies is not None:
            sums = expected_attention.add_queries(sums, query, position[0, 0], self.frequencies)
        if (start + n) % self.block == 0 and keys.shape[2] > budget:
            known = _Known(keys, values, positions, received, sums, start + n)
            kept = self._score(weights, known, scale, budget).topk(budget, -1).indices.sort(-1).values
            entries = entries.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, entries.shape[-1]))
            positions, received = positions.gather(2, kept), received.gather(2, kept)
        return out, _Held(encode(entries, D, self.bits), positions, received, sums)

    def _score(self, weights: Tensor, known: "_Known", scale: float, budget: int) -> Tensor:
        """(B, H, keys), the largest are kept; weights: (B, H, G, n, keys) of the last tokens."""
        keys, position = known.keys, known.positions
        if self.rule == "tova":
            return weights[..., -1, :].mean((1, 2), keepdim=True).squeeze(2).expand(-1, keys.shape[1], -1)
        if self.rule == "streaming":
            score = position.to(keys.dtype)
        elif self.rule == "h2o":
            score = known.received
        elif self.rule == "knorm":
            score = -keys.norm(dim=-1)
        elif self.rule == "keydiff":
            score = -cosine_similarity(keys, normalize(keys, dim=-1).mean(2, keepdim=True), dim=-1)
        elif self.frequencies is not None:
            end = known.tokens
            score = expected_attention.score(
                known.query_sums, end, keys, known.values, end=end, scale=scale, frequencies=self.frequencies
            )
        else:
            score = avg_pool1d(known.received, POOLED, 1, POOLED // 2)
        protected = position < self.sinks
        if self.rule != "streaming":
            protected = protected | (position >= known.tokens - max(min(self.recent, budget), self.block))
        return score.masked_fill(protected, torch.inf)


class _Held(NamedTuple):
    """The keys of heads with equal budgets: entries (B, h, n, W), the rest as in EvictionState, (B, h, n) and (B, h, Q)."""

    entries: Tensor
    position: Tensor
    received: Tensor
    query_sums: Tensor

    def of(self, heads: Sequence[int]) -> "_Held":
        return _Held(*(x[:, list(heads)] for x in self))


class _Known(NamedTuple):
    """What rules choose by: keys (B, H, n, D), values (B, H, n, M), the rest as in _Held; `tokens` read so far."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    received: Tensor
    query_sums: Tensor
    tokens: int


def rotary_frequencies(config: Any) -> Tensor | None:
    """Of a model whose queries and keys are turned as a whole by plain rotary positions; None for others."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
        return None
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
