"""The state of linear attention: running sums of key features."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.base import Kernel
from ..ops.linear_attention.decay import forgetting
from .base import State, pack_of
from .layout import Spec

__all__ = ["LinearState", "Nothing", "Pack", "State"]


class Pack:
    """S, Z, log_scale, tokens and guarded in one buffer of float32, each at a multiple of 16.

    csrc/linear/forward_calls.h has the same layout.
    """

    __slots__ = ("buffer", "sizes")

    def __init__(self, buffer: Tensor, sizes: tuple[int, int, int, int]):
        self.buffer, self.sizes = buffer, sizes

    @staticmethod
    def floats(sizes: tuple[int, int, int, int]) -> int:
        """Size of the buffer in floats."""
        return sum(-(-size // 16) * 16 for size in Pack._parts(sizes))

    @staticmethod
    def offsets(sizes: tuple[int, int, int, int]) -> list[int]:
        """Where S, Z, log_scale, tokens and guarded begin, in floats."""
        ends = itertools.accumulate(-(-size // 16) * 16 for size in Pack._parts(sizes))
        return [0, *ends][:-1]

    @staticmethod
    def _parts(sizes: tuple[int, int, int, int]) -> list[int]:
        B, H, r, M = sizes
        return [B * H * r * M, B * H * r, B * H, 2 * B * H, 2 * B * H]

    def tensors(self) -> dict[str, Tensor]:
        parts = zip(self.offsets(self.sizes), self._parts(self.sizes), strict=True)
        S, Z, log_scale, tokens, guarded = (self.buffer[at : at + size] for at, size in parts)
        B, H, r, M = self.sizes
        return {
            "S": S.view(B, H, r, M),
            "Z": Z.view(B, H, r),
            "log_scale": log_scale.view(B, H),
            # Copies: torch.save refuses tensors that view one memory as two types.
            "tokens": tokens.view(torch.int64).view(B, H).clone(),
            "guarded": guarded.view(torch.int64).view(B, H).clone(),
        }


class Nothing:
    """Lazily allocated empty state; engines recognise it and need no tensors."""

    def __init__(self, shape: tuple[int, ...], features: int, value_dim: int, options: dict[str, Any]):
        self.shape, self.features, self.value_dim, self.options = shape, features, value_dim, options

    def tensors(self) -> dict[str, Tensor]:
        device = self.options["device"]
        return {
            "S": torch.zeros(*self.shape, self.features, self.value_dim, **self.options),
            "Z": torch.zeros(*self.shape, self.features, **self.options),
            "log_scale": torch.full(self.shape, -torch.inf, **self.options),
            "tokens": torch.zeros(self.shape, dtype=torch.int64, device=device),
            "guarded": torch.zeros(self.shape, dtype=torch.int64, device=device),
        }


@dataclass(eq=False, repr=False)
class LinearState(State):
    """S and Z of a linear kernel, for each kv head; true sums are S exp(log_scale) and Z exp(log_scale).

    Attributes:
        S: (..., kv_heads, features, value_dim), sum of phi(k) v.
        Z: (..., kv_heads, features), sum of phi(k).
        log_scale: (..., kv_heads); -inf before the first key.
        tokens: (..., kv_heads), keys seen, masked ones not counted.
        guarded: (..., kv_heads), rows so far whose denominator was too small to divide by; their output is 0.
    """

    S: Tensor
    Z: Tensor
    log_scale: Tensor
    tokens: Tensor
    guarded: Tensor

    form: ClassVar[str] = "sums"
    table: ClassVar[dict[str, Spec]] = {
        "S": Spec(("H", "r", "M")),
        "Z": Spec(("H", "r")),
        "log_scale": Spec(("H",), "log"),
        "tokens": Spec(("H",), "count"),
        "guarded": Spec(("H",), "count"),
    }

    @staticmethod
    def empty(
        kernel: str,
        batch: tuple[int, ...],
        heads: int,
        features: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> "LinearState":
        """The state before any token."""
        nothing = Nothing((*batch, heads), features, value_dim, {"dtype": dtype, "device": device})
        if torch.compiler.is_compiling():
            return LinearState(kernel=kernel, **nothing.tensors())
        return LinearState.packed(kernel, nothing)

    @property
    def untouched(self) -> bool:
        """True for an empty state whose tensors were never accessed or set."""
        return isinstance(pack_of(self), Nothing)

    def subtract(
        self,
        key: Tensor,
        value: Tensor,
        kernel: Kernel,
        *,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        log_decay: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> "LinearState":
        """Rolls back: the state without its last tokens, whose keys, values, mask and gates are passed again.

        Exact up to rounding. Raises ValueError if those tokens outweigh all others by more than float32 can represent;
        keep a clone() from before them instead.
        """
        signature = kernel.signature(scale, key.shape[-1])
        if signature != self.kernel:
            raise ValueError(f"this state was made by {self.kernel}; {signature} cannot take tokens out of it.")
        if key_mask is not None:
            hidden = ~key_mask[..., None, :, None]
            key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        features, log_weight = kernel.scaled_key_features(key, scale=scale)
        level = features.new_zeros(features.shape[:-1]) if log_weight is None else log_weight
        total = features.new_zeros(())
        log_decay, log_input, writes = forgetting(log_decay, gate, key_mask)
        if log_decay is not None:
            total = log_decay.sum(-1)
            level = level + total.unsqueeze(-1) - log_decay.cumsum(-1) + (0 if log_input is None else log_input)
        if key_mask is not None:
            level = level.masked_fill(~key_mask.unsqueeze(-2), -torch.inf)
        weighted = features * (level - self.log_scale.unsqueeze(-1)).exp().to(features.dtype).unsqueeze(-1)
        taken = weighted.sum(-2)
        Z = self.Z - taken
        tokens = self.tokens - count_written(key, key_mask, writes)
        # Sums of non-negative features stay non-negative: a negative one shows that the subtraction is invalid.
        if bool((self.Z >= 0).all()) and bool((taken >= 0).all()):
            if bool((-1e-3 * self.Z.amax(-1, keepdim=True) > Z).any()):
                raise ValueError(
                    "these tokens are not the last ones of this state: more would be taken out than it holds."
                )
            if bool(((Z.sum(-1) < 1e-4 * self.Z.sum(-1)) & (tokens > 0)).any()):
                raise ValueError(
                    "the last tokens outweigh all earlier ones, so these cannot be recovered by subtraction: "
                    "keep a clone() of the state from before them."
                )
        if bool((tokens < 0).any()):
            raise ValueError(f"cannot take {key.shape[-2]} tokens out of a state of {int(self.tokens.min())}.")
        return dataclasses.replace(
            self,
            S=self.S - weighted.mT @ value.to(weighted.dtype),
            Z=Z,
            log_scale=(self.log_scale - total).to(self.log_scale.dtype).masked_fill(tokens == 0, -torch.inf),
            tokens=tokens,
        )

    def _describe(self, sizes: dict[str, int]) -> list[str]:
        return [f"features={sizes['r']}", f"value_dim={sizes['M']}"]

    @property
    def feature_dim(self) -> int:
        """Features per token, r."""
        return self.S.shape[-2]

    @property
    def value_dim(self) -> int:
        """Dim of the values, M."""
        return self.S.shape[-1]


def count_written(key: Tensor, key_mask: Tensor | None, writes: Tensor | None = None) -> Tensor | int:
    """How many keys (..., kv heads, S, D) enter the sums: an int, or (..., 1) or (..., kv heads)."""
    if writes is None:
        return key.shape[-2] if key_mask is None else key_mask.sum(-1, keepdim=True)
    return (writes if key_mask is None else writes & key_mask.unsqueeze(-2)).sum(-1)


torch.serialization.add_safe_globals([LinearState])  # torch.load(weights_only=True) takes them
