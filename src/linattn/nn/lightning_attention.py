"""LightningAttention: decayed sums with one constant decay for each head, as a layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..functional.decayed_sums import decayed_sums
from ..functional.recurrent import EngineName
from ..states import ConvState, State
from .recurrent import MixerState, RMSNorm, TokenMixer, merge_heads


class LightningAttention(TokenMixer):
    """The linear attention of MiniMax, with the parameters of transformers' MiniMaxLightningAttention.

    >>> import torch
    >>> from linattn.nn import LightningAttention
    >>> LightningAttention(64, num_heads=4, head_dim=16)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])

    Args:
        hidden_size: width of the input and the output.
        num_heads, head_dim: of queries, keys and values.
        layer, layers: index of this layer and number of layers; later layers decay more slowly.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 8,
        head_dim: int = 64,
        layer: int = 0,
        layers: int = 1,
        norm_eps: float = 1e-6,
        engine: EngineName = "auto",
    ):
        super().__init__()
        self.head_dim, self.engine = head_dim, engine
        inner = num_heads * head_dim
        self.qkv_proj = nn.Linear(hidden_size, 3 * inner, bias=False)
        self.output_gate = nn.Linear(hidden_size, inner, bias=False)
        self.norm = RMSNorm(inner, norm_eps)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        rate = (2 ** (-8 / num_heads)) ** torch.arange(1, num_heads + 1)
        factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        self.slope_rate: Tensor
        self.register_buffer("slope_rate", (rate * factor)[:, None, None])
        self.register_load_state_dict_pre_hook(_without_derived_decays)

    def _mix(
        self, x: Tensor, key_mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, State | None, ConvState | None]:
        mixed = torch.unflatten(F.silu(self.qkv_proj(x)), -1, (-1, 3 * self.head_dim)).transpose(1, 2)
        query, key, value = mixed.chunk(3, -1)  # (B, heads, T, dim) each
        out, after = decayed_sums(
            query,
            key,
            value,
            log_decay=-self.slope_rate[:, :, 0].expand(-1, query.shape[2]),
            scale=1.0,
            key_mask=key_mask,
            state=None if state is None else state.rule,
            return_state=return_state,
            engine=self.engine,
        )
        gate = torch.sigmoid(self.output_gate(x))
        rows = self.out_proj(gate * self.norm(merge_heads(out)))
        return rows, after if return_state else None, None


def _without_derived_decays(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """MiniMax's files also hold powers of the decay within its blocks, which follow from slope_rate."""
    for name in ("query_decay", "key_decay", "diagonal_decay"):
        state_dict.pop(prefix + name, None)
