"""The kernel object of near/far attention, an approximation of softmax in linear time."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from ..kernels.base import Kernel, is_plain
from .biases import Scores, capped
from .entry_codes import round_entries, stored_dtype, stored_width

RECALL_UNIT = 8  # tokens in a block of recall: smaller blocks are found more reliably, larger ones are cheaper to score
TableLike = Tensor | Callable[[], Tensor]
_NO_FEATURES = "near/far attention has no fixed feature map: its features are slots that follow the keys."


class Plans(dict[tuple[object, ...], object]):
    """What the native fast path worked out for a kernel. It points to memory, so copies of the kernel begin without it."""

    def __deepcopy__(self, _: object) -> "Plans":
        return Plans()

    def __reduce__(self) -> tuple[type["Plans"], tuple[()]]:
        return Plans, ()


class NearFar(Kernel):
    """Approximates softmax, sim(q, k) = exp(scale q.k): near keys are exact, far keys pooled into a bounded number of slots.

    The slots follow the keys, so the error depends on them. It is small on the keys of trained models, which cluster: the
    perplexity of SmolLM2-135M at 2048 tokens rises by less than 1 %. It is large on Gaussian keys: a relative error of 0.3
    at 2048 tokens with a causal mask, and of 0.7 without. `linattn.measure.fidelity` measures it on your tensors. Up to
    window + sinks + slots keys, nothing is pooled.

    >>> import torch, linattn
    >>> q, k, v = (torch.randn(1, 4, 600, 32) for _ in range(3))
    >>> kernel = linattn.NearFar(window=64, slots=64)
    >>> linattn.attention(q, k, v, kernel=kernel, is_causal=True).shape
    torch.Size([1, 4, 600, 32])

    Args:
        window: the last tokens, always exact. Without is_causal: the tokens on both sides.
        slots: weighted pseudo-tokens that stand for all farther tokens; a number, or one for each kv head.
        sinks: the first tokens, always exact.
        block: slots are merged every `block` tokens, at absolute positions.
        alpha: how much the weight that a slot receives protects it from being merged; with 0 only distances count.
        recall: how many blocks of 8 far tokens every query attends to exactly, the most promising ones; a number, or one
            for each kv head. Heads with recall store all far tokens: their memory grows with the sequence. Causal only.
        recall_bits: of the stored far tokens: 32, 16 (half precision) or 8 (quantized).
        state_bits: of the keys and values in the state: 32, 16 (half precision) or 8 (quantized, in groups of 32 numbers).
            Keys and values are rounded as they arrive, and slots after every merge. Less than 32 goes
            with neither alibi_slopes nor position_bias, whose positions need 32 bits.
        logit_cap: a score s becomes logit_cap tanh(s / logit_cap), as in Gemma 2; for a slot, the score of its mean key.
        alibi_slopes: (query heads), as in BLOOM and MPT: slope (j - i) is added to the score of query i and key j. For a slot,
            j is the mean position of its keys. Causal only.
        position_bias: (query heads, 2 n + 1), or a function that returns it, as in T5: added to the capped score of a key at
            the relative position j - i = -n .. n; its ends also stand for everything farther. A slot of a causal call is at
            the mean position of its keys; without is_causal, far keys count as farther than n. Tables may have gradients.

    Positions count visible tokens.
    """

    stands_for_softmax = True
    has_features = False
    any_dim = True

    def __init__(  # noqa: PLR0913
        self,
        window: int = 128,
        slots: int | Sequence[int] | Tensor = 128,
        sinks: int = 4,
        block: int = 64,
        alpha: float = 1.0,
        *,
        recall: int | Sequence[int] | Tensor = 0,
        recall_bits: int = 32,
        state_bits: int = 32,
        logit_cap: float | None = None,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        position_bias: TableLike | None = None,
        dim: int | None = None,
    ):
        super().__init__(dim)
        self.window = _read_number("window", window)
        self.sinks = _read_number("sinks", sinks)
        self.block = _read_number("block", block, least=1)
        if not 0 <= alpha < math.inf:
            raise ValueError(f"NearFar: alpha must be a finite number that is not negative, got {alpha}.")
        self.alpha = float(alpha)
        self.slots: int | tuple[int, ...] = _read_numbers("slots", slots)
        blocks = _read_numbers("recall", recall)
        self.recall: int | tuple[int, ...] = blocks if isinstance(blocks, int) or any(blocks) else 0
        if recall_bits not in (32, 16, 8):
            raise ValueError(f"NearFar: recall_bits must be 32, 16 or 8, got {recall_bits}.")
        self.recall_bits = int(recall_bits)
        if state_bits not in (32, 16, 8):
            raise ValueError(f"NearFar: state_bits must be 32, 16 or 8, got {state_bits}.")
        self.state_bits = int(state_bits)
        if logit_cap is not None and not 0 < logit_cap < math.inf:
            raise ValueError(f"NearFar: logit_cap must be positive and finite, got {logit_cap}.")
        self.logit_cap = None if logit_cap is None else float(logit_cap)
        self._read_biases(alibi_slopes, position_bias)
        self.native_plans = Plans()  # keyed by `changes` too

    def budgets(self, heads: int) -> tuple[int, ...]:
        """The slots of each kv head."""
        return _by_head("slots", self.slots, heads)

    def recalls(self, heads: int) -> tuple[int, ...]:
        """The blocks that each kv head recalls."""
        return _by_head("recall", self.recall, heads)

    def groups(self, heads: int) -> list[tuple[int, list[int]]]:
        """Budget and kv heads of each group of heads with equal budgets and recall, so that work follows the sum of budgets."""
        kinds = list(zip(self.budgets(heads), self.recalls(heads), strict=True))
        return [(kind[0], [h for h in range(heads) if kinds[h] == kind]) for kind in sorted(set(kinds))] or [(0, [])]

    def with_slots(
        self, slots: int | Sequence[int] | Tensor, recall: int | Sequence[int] | Tensor | None = None
    ) -> "NearFar":
        """The same kernel with other budgets."""
        return self.changed(slots=slots, recall=self.recall if recall is None else recall)

    def changed(self, **options: object) -> "NearFar":
        """The same kernel with some other options, by the names of the constructor."""
        names = ("window", "slots", "sinks", "block", "alpha", "recall", "recall_bits", "state_bits", "logit_cap")
        given: dict[str, Any] = {name: getattr(self, name) for name in (*names, "alibi_slopes", "position_bias", "dim")}
        return NearFar(**given | options)

    def of_heads(self, heads: Sequence[int]) -> "NearFar":
        """The biases of some of the query heads; slots and recall stay as they are."""
        table = self.bias_table()
        return self.changed(
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes[list(heads)],
            position_bias=None if table is None else table[list(heads)],
        )

    def _read_biases(self, slopes: Tensor | Sequence[float] | None, table: TableLike | None) -> None:
        self.alibi_slopes: Tensor | None
        self.position_bias: Any
        if slopes is not None and (table is not None or self.logit_cap is not None):
            raise ValueError("NearFar: alibi_slopes go neither with position_bias nor with logit_cap.")
        if self.state_bits < 32 and (slopes is not None or table is not None):
            raise ValueError(
                f"NearFar: state_bits={self.state_bits} goes with neither alibi_slopes nor position_bias: use 32."
            )
        slopes = None if slopes is None else torch.as_tensor(slopes).detach().float()
        if slopes is not None and (slopes.dim() != 1 or not bool(slopes.isfinite().all())):
            raise ValueError(
                f"NearFar: alibi_slopes must be one finite number per query head, got {tuple(slopes.shape)}."
            )
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        self._slopes: list[float] = [] if slopes is None else slopes.tolist()
        if isinstance(table, Tensor):
            _check_table(table)
        if isinstance(table, Tensor) and not isinstance(table, nn.Parameter):
            self.register_buffer("position_bias", table, persistent=False)
        else:
            self.position_bias = table
        # Coordinates that keys and queries get for their positions, see `biases`.
        self.positions = 1 if slopes is not None else 2 if table is not None else 0

    def bias_table(self) -> Tensor | None:
        """position_bias, (query heads, 2 n + 1)."""
        if self.position_bias is None or isinstance(self.position_bias, Tensor):
            return self.position_bias
        table: Tensor = self.position_bias()
        _check_table(table)
        return table

    @property
    def reach(self) -> int:
        """How far position_bias tells distances apart: n, or 0 without it."""
        table = self.bias_table()
        return 0 if table is None else table.shape[1] // 2

    def scores(self, groups: int, like: Tensor) -> Scores:
        """How logits are made, for all kv heads with `groups` query heads each, in the dtype of `like`."""
        table = self.bias_table()
        if table is not None:
            table = table.to(like).unflatten(0, (-1, groups))
        return Scores(self.logit_cap, table)

    @property
    def recall_unit(self) -> int:
        """Tokens in a block of recall; it divides the block of merging."""
        return max(n for n in range(1, RECALL_UNIT + 1) if self.block % n == 0)

    def state_bytes(self, slots: int, dim: int, value_dim: int, groups: int) -> int:
        """Bytes of the state of one kv head with `groups` query heads, for calls in float32 and without recall."""
        dim, tokens = dim + self.positions, self.sinks + self.window + self.block
        statistics = 2 * self.window + (2 + groups * (self.block // self.stride)) * (dim + 1)
        return tokens * self.entry_bytes(dim, value_dim) + slots * self.slot_bytes(dim, value_dim) + 4 * statistics

    def entry_bytes(self, dim: int, value_dim: int) -> int:
        """Bytes of a key with its value."""
        return stored_width(self.state_bits, dim, value_dim) * self.state_bits // 8

    def slot_bytes(self, dim: int, value_dim: int) -> int:
        """Bytes of a slot: an entry, its bias, and the attention that it received from how many queries."""
        return self.entry_bytes(dim, value_dim) + 12

    def recall_price(self, length: int, dim: int, value_dim: int) -> int:
        """How many slots take the memory that recall of a text needs in one head."""
        return round(max(0, length - self.window) * self.recall_bytes(dim, value_dim) / self.slot_bytes(dim, value_dim))

    def entry_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the state's keys and values, for calls that compute in `dtype`."""
        return stored_dtype(self.state_bits, dtype)

    def stored(self, entries: Tensor, dim: int) -> Tensor:
        """Keys (dim) beside values as the state keeps them: rounded, with gradients passed straight through."""
        if self.state_bits == 32:
            return entries
        rounded = round_entries(entries.detach(), dim, self.state_bits)
        if self.state_bits == 16 and is_plain(entries):
            refuse_overflow(entries)
        return entries + (rounded - entries.detach()) if entries.requires_grad else rounded

    def recall_bytes(self, dim: int, value_dim: int) -> float:
        """Bytes that a head with recall stores per far token: key, value, its part of the bounds, slot and share."""
        dim, unit = dim + self.positions, self.recall_unit
        bounds = (2 * dim + (unit if self.recall_bits == 8 else 0)) * max(16, self.recall_bits) / unit
        return ((dim + value_dim) * self.recall_bits + bounds) / 8 + 12

    @property
    def stride(self) -> int:
        """Every how many tokens a query is sampled: plenty for a mean and a covariance."""
        return 4 if self.block % 4 == 0 else 1

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        if self.positions:
            raise ValueError(
                "the similarity of near/far with position biases depends on positions, which tokens do not have."
            )
        query, key = self.widen(query), self.widen(key)
        return capped(query @ key.mT * self.logit_scale(query.shape[-1], scale), self.logit_cap).exp()

    def features_for(self, dim: int) -> int:
        raise ValueError(_NO_FEATURES)

    def scaled_query_features(self, query: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        raise ValueError(_NO_FEATURES)

    def scaled_key_features(self, key: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor | None]:
        raise ValueError(_NO_FEATURES)

    def extra_repr(self) -> str:
        text = f"window={self.window}, slots={self.slots}, sinks={self.sinks}, block={self.block}, alpha={self.alpha:g}"
        if self.recall:
            text += f", recall={self.recall}" + (f", recall_bits={self.recall_bits}" if self.recall_bits < 32 else "")
        text += f", state_bits={self.state_bits}" if self.state_bits < 32 else ""
        if self.logit_cap is not None:
            text += f", logit_cap={self.logit_cap:g}"
        if self.alibi_slopes is not None:
            # A compiled graph cannot read a tensor; there, slopes are those that the kernel was made with.
            slopes = self._slopes if torch.compiler.is_compiling() else self.alibi_slopes.tolist()
            text += f", alibi_slopes=[{', '.join(f'{x:g}' for x in slopes)}]"
        return text + (", position_bias" if self.position_bias is not None else "")


def refuse_overflow(*tokens: Tensor) -> None:
    """An error if one of the tokens is finite, but not in 16 bits."""
    most = max([0.0, *(float(x.detach().abs().max()) for x in tokens if x.numel())])
    if most < math.inf and not math.isfinite(torch.tensor(most).half()):
        raise ValueError(
            f"a scaled key or a value is as large as {most:.3g}, and NearFar(state_bits=16) holds "
            "numbers up to 65504. Pass NearFar(state_bits=32) or 8."
        )


def _check_table(table: Tensor) -> None:
    if table.dim() != 2 or table.shape[1] % 2 == 0 or not table.is_floating_point():
        raise ValueError(
            f"NearFar: position_bias must be (query heads, 2 n + 1) numbers, got {table.dtype} of {tuple(table.shape)}."
        )


def _read_numbers(name: str, given: int | Sequence[int] | Tensor) -> int | tuple[int, ...]:
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dim() > 1:
            raise ValueError(
                f"NearFar: {name} must be whole numbers, one per kv head, got {given.dtype} of {tuple(given.shape)}."
            )
        given = given.tolist()
    if isinstance(given, Sequence):
        if not given or isinstance(given, str):
            raise ValueError(f"NearFar: {name} must be numbers >= 0, one per kv head, got {given!r}.")
        return tuple(_read_number(name, m) for m in given)
    return _read_number(name, given)


def _read_number(name: str, given: SupportsIndex, least: int = 0) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"NearFar: {name} must be a whole number, got {given!r}.") from None
    if number < least:
        raise ValueError(f"NearFar: {name} must be at least {least}, got {number}.")
    return number


def _by_head(name: str, numbers: int | tuple[int, ...], heads: int) -> tuple[int, ...]:
    if isinstance(numbers, int):
        return (numbers,) * heads
    if len(numbers) != heads:
        raise ValueError(f"NearFar has {name} for {len(numbers)} kv heads, but the keys have {heads}.")
    return numbers
