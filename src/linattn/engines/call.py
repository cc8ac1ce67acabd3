"""One call of attention, described once: what every engine is told beside the tokens."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from ..kernels.base import Kernel
from ..ops.packing import Packing

EngineName = Literal["auto", "torch", "native"]
ENGINES: tuple[str, ...] = get_args(EngineName)


@dataclass(frozen=True)
class Call:
    """A checked call, on tensors with one batch dimension: query (B, heads, L, D), key (B, kv heads, S, D), value likewise.

    Attributes:
        signature: of the kernel and scale, as states carry it.
        key_mask: (B, S), True = attend.
        log_decay: (B, kv heads, S) float64, of what multiplies the sums before a token is added.
        log_input: (B, kv heads, S) float64, of what multiplies the token itself.
        writes: (B, kv heads, S), False for tokens that a gate of exactly 1 keeps out; None if there are none.
        packing: of queries and keys that are still packed; then B counts batch entries, and a state has entries * sequences
            rows.
    """

    kernel: Kernel
    scale: float | None
    signature: str
    is_causal: bool = False
    normalize: bool = True
    return_state: bool = False
    engine: EngineName = "auto"
    key_mask: Tensor | None = None
    log_decay: Tensor | None = None
    log_input: Tensor | None = None
    writes: Tensor | None = None
    packing: tuple[Packing, Packing] | None = None

    def keys(self, start: int, stop: int) -> "Call":
        """The same call for the keys [start, stop) alone."""
        mask, log_decay, log_input, writes = (
            None if x is None else x[..., start:stop]
            for x in (self.key_mask, self.log_decay, self.log_input, self.writes)
        )
        return replace(self, key_mask=mask, log_decay=log_decay, log_input=log_input, writes=writes)
