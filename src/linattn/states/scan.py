"""The states of the selective scan and of the causal convolution."""

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from .base import State
from .layout import Spec


@dataclass(eq=False, repr=False)
class ScanState(State):
    """The state of linattn.selective_scan.

    Attributes:
        h: (..., channels, n), in float32 or float64.
    """

    h: Tensor

    form: ClassVar[str] = "scan"
    table: ClassVar[dict[str, Spec]] = {"h": Spec(("Ch", "n"))}

    @staticmethod
    def empty(
        batch: tuple[int, ...],
        channels: int,
        n: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> "ScanState":
        """The state before any token."""
        return ScanState("selective_scan", torch.zeros(*batch, channels, n, dtype=dtype, device=device))

    def drop_last(self, tokens: int) -> NoReturn:
        """Always raises ValueError: earlier states are not kept."""
        raise ValueError(
            f"the state of a scan has decayed since its last {tokens} tokens, so they cannot be taken out of it: "
            "keep a clone() from before them and go on from that."
        )

    def _describe(self, sizes: dict[str, int]) -> list[str]:
        return [f"channels={sizes['Ch']}", f"n={sizes['n']}"]


@dataclass(eq=False, repr=False)
class ConvState(State):
    """The state of linattn.causal_conv1d.

    Attributes:
        inputs: (..., channels, width - 1), the last inputs, oldest first, in the inputs' dtype; zeros where there were none.
    """

    inputs: Tensor

    form: ClassVar[str] = "conv"
    table: ClassVar[dict[str, Spec]] = {"inputs": Spec(("Ch", "W1"))}

    @staticmethod
    def empty(
        batch: tuple[int, ...],
        channels: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> "ConvState":
        """The state before any token."""
        return ConvState("causal_conv1d", torch.zeros(*batch, channels, width - 1, dtype=dtype, device=device))

    def drop_last(self, tokens: int) -> NoReturn:
        """Always raises ValueError: earlier states are not kept."""
        raise ValueError(
            f"a convolution keeps only its last inputs, so the ones before the last {tokens} tokens are gone: "
            "keep a clone() from before them and go on from that."
        )

    def _describe(self, sizes: dict[str, int]) -> list[str]:
        return [f"channels={sizes['Ch']}", f"width={sizes['W1'] + 1}"]


torch.serialization.add_safe_globals([ScanState, ConvState])  # torch.load(weights_only=True) takes them
