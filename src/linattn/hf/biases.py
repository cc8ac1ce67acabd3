"""What a layer does to its scores before the softmax: capped logits (Gemma 2), ALiBi (BLOOM, ..), T5's position bias."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..nearfar import NearFar
from .own_softmax import slopes_of

# Classes of modules that read their relative position bias like T5: a table of buckets, of the module or of the first layer.
BUCKETS = (
    "T5Attention",
    "MT5Attention",
    "UMT5Attention",
    "SwitchTransformersAttention",
    "LongT5Attention",
    "Pop2PianoAttention",
)
CROSS = "EncDecAttention"  # the name of their cross-attention, which has no bias


class BucketTable:
    """T5's bias as a table over relative positions, (heads, 2 n + 1): reads the learned buckets whenever it is called.

    Not a module, so that the buckets stay where they are in the model's state_dict.
    """

    def __init__(self, module: Any):
        self.module, self.buckets = module, _buckets(module)

    def __call__(self) -> Tensor:
        weight: Tensor = self.module.relative_attention_bias.weight
        return weight[self.buckets.to(weight.device)].T


def _buckets(module: Any) -> Tensor:
    """The bucket (2 n + 1) of each relative position -n .. n, by the module's own rule; beyond n it does not change."""
    n = int(module.relative_attention_max_distance)
    relative = torch.arange(-n, n + 1)
    rule: Any = module._relative_position_bucket  # noqa: SLF001
    found: Tensor
    if type(module).__name__ == "UMT5Attention":  # which reads its options itself
        found = rule(relative)
    else:
        buckets = module.relative_attention_num_buckets
        found = rule(relative, bidirectional=not module.is_decoder, num_buckets=buckets, max_distance=n)
    return found


@dataclass(frozen=True, eq=False)
class LayerBiases:
    """Of one layer; None for what it does not have.

    Attributes:
        table: T5's. slopes: (heads), ALiBi's.
        understood: the layer has a position bias of a known kind, which the function it calls need not be told.
    """

    cap: float | None = None
    table: BucketTable | None = None
    slopes: Tensor | None = None
    understood: bool = False

    @property
    def any(self) -> bool:
        return self.cap is not None or self.table is not None or self.slopes is not None

    def check_cap(self, module: Any, cap: float | None) -> None:
        """Refuses layers that call attention with another cap than they name, such as Gemma 3's with one."""
        if cap != self.cap:
            raise ValueError(
                f"linattn cannot serve {type(module).__name__}: its logits are to be capped at {self.cap}, but it calls "
                f"attention with softcap={cap}. Call linattn.hf.detach."
            )

    def given_to(self, kernel: NearFar) -> NearFar:
        """The kernel with these biases."""
        if not self.any:
            return kernel
        bits = kernel.state_bits if self.table is None and self.slopes is None else 32  # positions need them
        biases = {"logit_cap": self.cap, "position_bias": self.table, "alibi_slopes": self.slopes}
        return kernel.changed(**biases, state_bits=bits)

    def exact(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """What is added to the capped scores of softmax: (.., L, S), for queries at the last of the keys; None: nothing.

        key_mask: (B, S), or None.
        """
        L, S = query.shape[2], key.shape[2]
        if self.slopes is not None:
            place = torch.arange(S, device=key.device).unsqueeze(0) if key_mask is None else key_mask.cumsum(-1)
            return (self.slopes.to(key.device)[:, None, None] * place[:, None, None, :]).to(query.dtype)
        if self.table is None:
            return None
        table, place = self.table(), torch.arange(S, device=key.device)
        reach = table.shape[1] // 2
        relative = (place - place[S - L :].unsqueeze(-1)).clamp(-reach, reach)
        return table[:, relative + reach]


def biases_of(name: str, module: Any, found: Sequence[tuple[str, Any]]) -> LayerBiases:
    """Of a module that `attention_modules` found, among all of them."""
    cap = getattr(module, "attn_logit_softcapping", None)
    known = type(module).__name__ in BUCKETS
    table = _table(name, module, found) if known else None
    return LayerBiases(None if cap is None else float(cap), table, slopes_of(module), known)


def _table(name: str, module: Any, found: Sequence[tuple[str, Any]]) -> BucketTable | None:
    """T5's later layers take the bias of the first layer of their stack."""
    if name.endswith(CROSS):
        return None
    stack = name.split("block.")[0]
    owner = module
    if not module.has_relative_attention_bias:
        owner = next(m for n, m in found if n.startswith(f"{stack}block.0.") and not n.endswith(CROSS))
    return BucketTable(owner)
