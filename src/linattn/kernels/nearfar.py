"""The kernel object of near/far attention: softmax itself, kept faithful in linear time."""

from collections.abc import Sequence

from torch import Tensor

from .base import Kernel, softmax_similarity

RECALL_UNIT = 8  # tokens in a block of recall: fewer are found more surely, more are cheaper to look through
_NO_FEATURES = "near/far attention has no fixed feature map: its features are slots that follow the keys."


class NearFar(Kernel):
    """sim(q, k) = exp(scale q.k): exact for near keys, pooled into a bounded number of slots for far ones.

    >>> import torch, linattn
    >>> q, k, v = (torch.randn(1, 4, 600, 32) for _ in range(3))
    >>> kernel = linattn.NearFar(window=64, slots=64)
    >>> linattn.attention(q, k, v, kernel=kernel, is_causal=True).shape
    torch.Size([1, 4, 600, 32])

    Args:
        window: the last tokens, always exact. Without is_causal: the tokens on both sides.
        slots: weighted pseudo-tokens that stand for everything farther back; a number, or one for each kv head.
        sinks: the first tokens, always exact.
        block: slots are merged once for this many tokens, at absolute positions.
        alpha: how much a slot's expected weight protects it from being merged; 0 looks at distances alone.
        recall: blocks of 8 far tokens that every query attends to exactly, the most promising for it; a number, or one for
            each kv head. Heads with recall keep all their far tokens: their memory grows with the sequence. Causal only.
        recall_bits: 32 keeps those as they are, 16 in half precision, 8 in a quarter.
    """

    stands_for_softmax = True
    any_dim = True

    def __init__(
        self,
        window: int = 128,
        slots: int | Sequence[int] | Tensor = 128,
        sinks: int = 4,
        block: int = 64,
        alpha: float = 0.25,
        *,
        recall: int | Sequence[int] | Tensor = 0,
        recall_bits: int = 32,
        dim: int | None = None,
    ):
        super().__init__(dim)
        for name, number, least in (("window", window, 0), ("sinks", sinks, 0), ("block", block, 1)):
            if number < least:
                raise ValueError(f"NearFar: {name} must be at least {least}, got {number}.")
        if alpha < 0:
            raise ValueError(f"NearFar: alpha must not be negative, got {alpha}.")
        self.window, self.sinks, self.block, self.alpha = int(window), int(sinks), int(block), float(alpha)
        self.slots: int | tuple[int, ...] = _read_numbers("slots", slots)
        blocks = _read_numbers("recall", recall)
        self.recall: int | tuple[int, ...] = blocks if isinstance(blocks, int) or any(blocks) else 0
        if recall_bits not in (32, 16, 8):
            raise ValueError(f"NearFar: recall_bits must be 32, 16 or 8, got {recall_bits}.")
        self.recall_bits = int(recall_bits)

    def budgets(self, heads: int) -> tuple[int, ...]:
        """The slots of each kv head."""
        return _by_head("slots", self.slots, heads)

    def recalls(self, heads: int) -> tuple[int, ...]:
        """The blocks that each kv head recalls."""
        return _by_head("recall", self.recall, heads)

    def groups(self, heads: int) -> list[tuple[int, list[int]]]:
        """(slots, the kv heads that have so many and recall alike), so that the work follows the sum of budgets."""
        kinds = list(zip(self.budgets(heads), self.recalls(heads)))
        return [(kind[0], [h for h in range(heads) if kinds[h] == kind]) for kind in sorted(set(kinds))] or [(0, [])]

    def with_slots(
        self, slots: int | Sequence[int] | Tensor, recall: int | Sequence[int] | Tensor | None = None
    ) -> "NearFar":
        """The same kernel with other budgets."""
        return NearFar(
            self.window,
            slots,
            self.sinks,
            self.block,
            self.alpha,
            recall=self.recall if recall is None else recall,
            recall_bits=self.recall_bits,
            dim=self.dim,
        )

    @property
    def recall_unit(self) -> int:
        """Tokens in a block of recall, of which a whole number must make a block of merging."""
        return max(n for n in range(1, RECALL_UNIT + 1) if self.block % n == 0)

    def recall_bytes(self, dim: int, value_dim: int) -> float:
        """What a head with recall keeps for each far token: key and value, its part of the bounds, place and share."""
        unit = self.recall_unit
        bounds = (2 * dim + (unit if self.recall_bits == 8 else 0)) * max(16, self.recall_bits) / unit
        return ((dim + value_dim) * self.recall_bits + bounds) / 8 + 12

    @property
    def stride(self) -> int:
        """Query statistics look at every so-manieth token: plenty for a mean and a covariance."""
        return 4 if self.block % 4 == 0 else 1

    def similarity(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Tensor:
        return softmax_similarity(self, query, key, scale)

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
        return text


def _read_numbers(name: str, given: int | Sequence[int] | Tensor) -> int | tuple[int, ...]:
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dim() > 1:
            raise ValueError(
                f"NearFar: {name} must be whole numbers, one per kv head, got {given.dtype} of {tuple(given.shape)}."
            )
        given = given.tolist()
    if isinstance(given, Sequence):
        numbers = tuple(int(m) for m in given)
        if not numbers or min(numbers) < 0:
            raise ValueError(f"NearFar: {name} must be numbers >= 0, one per kv head, got {list(given)}.")
        return numbers
    if given < 0:
        raise ValueError(f"NearFar: {name} must be at least 0, got {given}.")
    return int(given)


def _by_head(name: str, numbers: int | tuple[int, ...], heads: int) -> tuple[int, ...]:
    if isinstance(numbers, int):
        return (numbers,) * heads
    if len(numbers) != heads:
        raise ValueError(f"NearFar has {name} for {len(numbers)} kv heads, but the keys have {heads}.")
    return numbers
