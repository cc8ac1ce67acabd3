"""The kernel object of near/far attention: softmax itself, kept faithful in linear time."""

from collections.abc import Sequence

from torch import Tensor

from .base import Kernel, softmax_similarity

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
        dim: int | None = None,
    ):
        super().__init__(dim)
        for name, number, least in (("window", window, 0), ("sinks", sinks, 0), ("block", block, 1)):
            if number < least:
                raise ValueError(f"NearFar: {name} must be at least {least}, got {number}.")
        if alpha < 0:
            raise ValueError(f"NearFar: alpha must not be negative, got {alpha}.")
        self.window, self.sinks, self.block, self.alpha = int(window), int(sinks), int(block), float(alpha)
        self.slots: int | tuple[int, ...] = _read_slots(slots)

    def budgets(self, heads: int) -> tuple[int, ...]:
        """The slots of each kv head."""
        if isinstance(self.slots, int):
            return (self.slots,) * heads
        if len(self.slots) != heads:
            raise ValueError(f"NearFar has slots for {len(self.slots)} kv heads, but the keys have {heads}.")
        return self.slots

    def groups(self, heads: int) -> list[tuple[int, list[int]]]:
        """(slots, the kv heads that have so many), so that the work follows the sum of budgets."""
        budgets = self.budgets(heads)
        return [(size, [h for h in range(heads) if budgets[h] == size]) for size in sorted(set(budgets))] or [(0, [])]

    def with_slots(self, slots: int | Sequence[int] | Tensor) -> "NearFar":
        """The same kernel with other budgets."""
        return NearFar(self.window, slots, self.sinks, self.block, self.alpha, dim=self.dim)

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
        return f"window={self.window}, slots={self.slots}, sinks={self.sinks}, block={self.block}, alpha={self.alpha:g}"


def _read_slots(slots: int | Sequence[int] | Tensor) -> int | tuple[int, ...]:
    if isinstance(slots, Tensor):
        if slots.is_floating_point() or slots.dim() > 1:
            raise ValueError(
                f"NearFar: slots must be whole numbers, one per kv head, got {slots.dtype} of {tuple(slots.shape)}."
            )
        slots = slots.tolist()
    if isinstance(slots, Sequence):
        sizes = tuple(int(m) for m in slots)
        if not sizes or min(sizes) < 0:
            raise ValueError(f"NearFar: slots must be numbers >= 0, one per kv head, got {list(slots)}.")
        return sizes
    if slots < 0:
        raise ValueError(f"NearFar: slots must be at least 0, got {slots}.")
    return int(slots)
