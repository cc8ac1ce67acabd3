"""KimiDeltaAttention: the delta rule with a decay for each channel, as a layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..functional.delta_rule import delta_rule
from ..functional.recurrent import EngineName
from ..states import ConvState, State
from .recurrent import (
    GatedRMSNorm,
    MixerState,
    TokenMixer,
    convolve,
    inverse_softplus_of_time_steps,
    merge_heads,
    short_conv,
    split_heads,
    wide,
)


class ForgetGate(nn.Module):
    """log_decay (B, heads, T, dim) from the input, through a low-rank projection."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, num_heads * head_dim, bias=False)
        self.dt_bias = nn.Parameter(inverse_softplus_of_time_steps(num_heads * head_dim))
        self.A_log = nn.Parameter(torch.empty(1, 1, num_heads, 1).uniform_(1, 16).log())

    def forward(self, x: Tensor) -> Tensor:
        time_step = F.softplus(wide(self.f_b_proj(self.f_a_proj(x))) + self.dt_bias)
        return -wide(self.A_log).exp().transpose(1, 2) * split_heads(time_step, self.head_dim)


class KimiDeltaAttention(TokenMixer):
    """The token mixer of Kimi Linear (KDA), with the parameters of transformers' KimiLinearDeltaAttention.

    >>> import torch
    >>> from linattn.nn import KimiDeltaAttention
    >>> KimiDeltaAttention(64, num_heads=4, head_dim=16)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])

    Args:
        hidden_size: width of the input and the output.
        num_heads, head_dim: of queries, keys and values.
        conv_size: width of the short convolution over them.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 8,
        head_dim: int = 64,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        engine: EngineName = "auto",
    ):
        super().__init__()
        self.head_dim, self.engine = head_dim, engine
        inner = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.conv1d = short_conv(3 * inner, conv_size)
        self.forget_gate = ForgetGate(hidden_size, num_heads, head_dim)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.g_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.g_b_proj = nn.Linear(head_dim, inner, bias=False)
        self.o_norm = GatedRMSNorm(head_dim, norm_eps, activation="sigmoid")
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, key_mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, State | None, ConvState | None]:
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        mixed, conv = convolve(mixed, self.conv1d, key_mask, state, self.engine, return_state)
        query, key, value = (split_heads(y, self.head_dim) for y in mixed.chunk(3, -1))
        found = delta_rule(
            query,
            key,
            value,
            beta=torch.sigmoid(self.b_proj(x)).transpose(1, 2),
            log_decay=self.forget_gate(x),
            normalize_qk=True,
            key_mask=key_mask,
            state=None if state is None else state.rule,
            return_state=return_state,
            engine=self.engine,
        )
        out, after = found if isinstance(found, tuple) else (found, None)
        gate = split_heads(self.g_b_proj(self.g_a_proj(x)), self.head_dim)
        rows = self.o_proj(merge_heads(self.o_norm(out, gate)))
        return rows, after, conv
