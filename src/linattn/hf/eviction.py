"""Baselines: bounded caches that drop keys, as their papers define the choice, in the streaming protocol of near/far.

Tokens are read in blocks. The queries of a block attend to the keys that are kept and to their own block; then keys are dropped
until `budget` are left. All heads of a layer keep equally many. These rules serve comparisons (`linattn fidelity --baselines`):
they are computed by plain torch and only for causal calls without padding.

| name | keeps, besides the first `sinks` and the last `recent` tokens | paper |
| --- | --- | --- |
| streaming | nothing: the window is as long as the budget allows | StreamingLLM, Xiao et al. 2023 |
| h2o | the largest sums of attention received so far | H2O, Zhang et al. 2023 |
| tova | the most attended by the last query, over all heads; nothing else is protected | TOVA, Oren et al. 2024 |
| snapkv | the most attended by the queries of the last block, smoothed over 5 positions | SnapKV, Li et al. 2024 |
| pyramidkv | the same, with budgets that fall from the first layer to the last | PyramidKV, Cai et al. 2024 |
| knorm | the keys with the smallest norm | Devoto et al. 2024 |
| keydiff | the keys least similar to the mean direction of all keys | KeyDiff, Park et al. 2025 |
| expected | the most attention expected of queries to come, by the norm of the value | Expected Attention, Devoto et al. 2025 |

DuoAttention is not among them: its retrieval heads keep every key, so that its memory is not bounded.
"""

from collections.abc import Mapping
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

RULES = ("streaming", "h2o", "tova", "snapkv", "pyramidkv", "knorm", "keydiff", "expected")
LEAST = 64  # keys that a layer keeps under PyramidKV, at least
POOLED = 5  # positions over which SnapKV smooths attention


@dataclass(eq=False, repr=False)
class EvictionState(State):
    """The keys that are kept, with their values, as near/far stores them (nearfar.entry_codes).

    Attributes:
        entries: (B, H, n, W), a key beside its value.
        position, received: (B, H, n), and the attention received.
        query_sums: (B, H, Q), what the rule `expected` knows of the queries so far; Q = 0 for the others.
    """

    entries: Tensor
    position: Tensor
    received: Tensor
    query_sums: Tensor
    tokens: Tensor

    form: ClassVar[str] = "eviction"
    table: ClassVar[dict[str, Spec]] = {
        "entries": Spec(("H", "n", "W"), "entry"),
        "position": Spec(("H", "n"), "count"),
        "received": Spec(("H", "n"), "statistic"),
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
        budget: int,
        *,
        recent: int = 128,
        sinks: int = 4,
        block: int = 64,
        bits: int = 32,
        frequencies: Tensor | None = None,
    ):
        """bits: of the keys and values that are kept: 32, 16 or 8, as in NearFar(state_bits=..).

        frequencies: (D / 2,), of the rotation of queries and keys by their positions; `expected` needs them.
        """
        super().__init__(None)
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}: the baselines are {', '.join(RULES)}.")
        if budget < sinks + 1:
            raise ValueError(f"a budget of {budget} keys leaves no room beside {sinks} sinks.")
        if rule == "expected" and frequencies is None:
            raise ValueError("the rule 'expected' needs a model with plain rotary positions: give their frequencies.")
        self.rule, self.budget, self.recent, self.sinks, self.block = rule, budget, min(recent, budget), sinks, block
        self.bits = bits
        self.frequencies = frequencies if rule == "expected" else None

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
        if state is None:
            none = torch.zeros(B, H, 0, dtype=torch.int64, device=key.device)
            start = torch.zeros(B, dtype=torch.int64, device=key.device)
            received = key.new_zeros(B, H, 0)
            sums = expected_attention.no_sums(query, H) if self.rule == "expected" else received
            entries = encode(torch.cat([key, value], -1)[:, :, :0], D, self.bits)
            state = EvictionState(self.rule, entries, none, received, sums, start)
        rows = []
        done = 0
        while done < L:
            count = min(L - done, self.block - int(state.tokens[0]) % self.block)
            cut = slice(done, done + count)
            row, state = self._block(query[:, :, cut], key[:, :, cut], value[:, :, cut], state, scale or D**-0.5)
            rows.append(row)
            done += count
        return torch.cat(rows, 2), state

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, state: EvictionState, scale: float
    ) -> tuple[Tensor, EvictionState]:
        """Tokens inside one block; keys are dropped at its end."""
        B, H, n, D = key.shape
        start = int(state.tokens[0])
        position = torch.arange(start, start + n, device=key.device).expand(B, H, n)
        entries = torch.cat([decode(state.entries, D, key.dtype), torch.cat([key, value], -1)], 2)
        keys, values = entries[..., :D], entries[..., D:]
        positions = torch.cat([state.position, position], 2)
        x = query.reshape(B, H, -1, n, D)
        logits = (x @ keys.unsqueeze(2).mT) * scale
        later = positions[:, :, None, None, :] > position[:, :, None, :, None]
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)  # (B, H, G, n, keys)
        out = (weights @ values.unsqueeze(2)).reshape(B, -1, n, value.shape[-1])
        received = torch.cat([state.received, state.received.new_zeros(B, H, n)], 2) + weights.sum(3).mean(2)
        sums = state.query_sums
        if self.frequencies is not None:
            sums = expected_attention.add_queries(sums, x, position[0, 0], self.frequencies)
        count = state.tokens + n
        if (start + n) % self.block == 0 and keys.shape[2] > self.budget:
            known = _Known(keys, values, positions, received, sums, int(count[0]))
            kept = self._score(weights, known, scale).topk(self.budget, -1).indices.sort(-1).values
            entries = entries.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, entries.shape[-1]))
            positions, received = positions.gather(2, kept), received.gather(2, kept)
        return out, EvictionState(self.rule, encode(entries, D, self.bits), positions, received, sums, count)

    def _score(self, weights: Tensor, known: "_Known", scale: float) -> Tensor:
        """(B, H, keys), the largest are kept; weights: (B, H, G, n, keys) of the last block."""
        keys, position, n = known.keys, known.positions, weights.shape[3]
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
            score = avg_pool1d(weights.mean((2, 3)), POOLED, 1, POOLED // 2)
        protected = position < self.sinks
        if self.rule != "streaming":
            protected = protected | (position >= known.tokens - max(self.recent, n))
        return score.masked_fill(protected, torch.inf)


class _Known(NamedTuple):
    """What rules choose by: keys (B, H, n, D), values (B, H, n, M), the rest as in EvictionState; `tokens` read so far."""

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


def baseline(rule: str, layers: int, budget: int, **options: Any) -> Mapping[int, Eviction]:
    """Layer -> its kernel, for `attach`, with `budget` keys in a layer on average."""
    if rule != "pyramidkv":
        return {layer: Eviction(rule, budget, **options) for layer in range(layers)}
    least = min(LEAST, budget)
    most = 2 * budget - least
    steps = [round(most - i * (most - least) / max(1, layers - 1)) for i in range(layers)]
    return {layer: Eviction(rule, keys, **options) for layer, keys in enumerate(steps)}
