"""The state of exact softmax: all keys and values."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import State
from .layout import Spec


@dataclass(eq=False, repr=False)
class KeyValueCache(State):
    """The keys and values: the state of exact softmax. It grows with every token.

    Attributes:
        key, value: (..., kv_heads, tokens, dim).
        visible: (..., tokens), False where the key was masked.
    """

    key: Tensor
    value: Tensor
    visible: Tensor

    form: ClassVar[str] = "cache"
    table: ClassVar[dict[str, Spec]] = {
        "key": Spec(("H", "N", "D")),
        "value": Spec(("H", "N", "M")),
        "visible": Spec(("N",), "flag"),
    }

    def _describe(self, sizes: dict[str, int]) -> list[str]:
        return [f"dim={sizes['D']}", f"value_dim={sizes['M']}", f"tokens={sizes['N']}"]

    def drop_last(self, tokens: int) -> "KeyValueCache":
        """The cache without its last tokens."""
        keep = self.key.shape[-2] - tokens
        if tokens < 0 or keep < 0:
            raise ValueError(f"cannot drop {tokens} of {self.key.shape[-2]} tokens.")
        return dataclasses.replace(
            self, key=self.key[..., :keep, :], value=self.value[..., :keep, :], visible=self.visible[..., :keep]
        )


torch.serialization.add_safe_globals([KeyValueCache])  # torch.load(weights_only=True) takes it
