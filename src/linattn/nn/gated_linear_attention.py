"""GatedLinearAttention: decayed sums with a decay for each channel, as a layer."""

from torch import Tensor, nn
from torch.nn import functional as F

from ..functional.decayed_sums import decayed_sums
from ..functional.recurrent import EngineName
from ..states import ConvState, State
from .recurrent import GatedRMSNorm, MixerState, TokenMixer, merge_heads, split_heads


class GatedLinearAttention(TokenMixer):
    """Gated linear attention (GLA), with the parameters of fla's GatedLinearAttention.

    >>> import torch
    >>> from linattn.nn import GatedLinearAttention
    >>> GatedLinearAttention(64, num_heads=4)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])

    Args:
        hidden_size: width of the input and the output.
        num_heads: of queries, keys and values.
        expand_k, expand_v: width of all keys and of all values, in units of hidden_size.
        gate_logit_normalizer: the log-decay is logsigmoid(..) divided by this: larger values decay more slowly.
        gate_low_rank_dim: inner width of the projection of the decays.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_logit_normalizer: float = 16.0,
        gate_low_rank_dim: int = 16,
        norm_eps: float = 1e-5,
        engine: EngineName = "auto",
    ):
        super().__init__()
        key_dim, value_dim = int(hidden_size * expand_k), int(hidden_size * expand_v)
        if key_dim % num_heads or value_dim % num_heads:
            raise ValueError(f"{num_heads} heads cannot share keys of width {key_dim} and values of width {value_dim}.")
        self.head_dims = key_dim // num_heads, value_dim // num_heads
        self.gate_logit_normalizer, self.engine = gate_logit_normalizer, engine
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.g_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False), nn.Linear(gate_low_rank_dim, key_dim, bias=True)
        )
        self.g_norm_swish_gate = GatedRMSNorm(self.head_dims[1], norm_eps)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, key_mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, State | None, ConvState | None]:
        key_dim, value_dim = self.head_dims
        out, after = decayed_sums(
            split_heads(self.q_proj(x), key_dim),
            split_heads(self.k_proj(x), key_dim),
            split_heads(self.v_proj(x), value_dim),
            log_decay=split_heads(F.logsigmoid(self.gk_proj(x)) / self.gate_logit_normalizer, key_dim),
            key_mask=key_mask,
            state=None if state is None else state.rule,
            return_state=return_state,
            engine=self.engine,
        )
        gate = split_heads(self.g_proj(x), value_dim)
        rows = self.o_proj(merge_heads(self.g_norm_swish_gate(out, gate)))
        return rows, after if return_state else None, None
