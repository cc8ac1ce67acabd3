"""Mamba2: decayed sums with input-dependent time steps (SSD), as a layer."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..functional.decayed_sums import decayed_sums
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


class Mamba2(TokenMixer):
    """The token mixer of Mamba-2, with the parameters of transformers' Mamba2Mixer.

    >>> import torch
    >>> from linattn.nn import Mamba2
    >>> Mamba2(64, num_heads=4, head_dim=32, state_size=16)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])

    Args:
        hidden_size: width of the input and the output.
        num_heads, head_dim: of the values; their product is the inner width.
        state_size: width of B and C, the keys and queries of this rule.
        n_groups: heads of B and C; each serves num_heads / n_groups heads, which are normalized together.
        conv_size, conv_bias: of the short convolution.
        time_step_limit: least and largest time step.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int = 64,
        state_size: int = 128,
        n_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        engine: EngineName = "auto",
    ):
        super().__init__()
        if num_heads % n_groups:
            raise ValueError(f"num_heads must be a multiple of n_groups, got {num_heads} and {n_groups}.")
        inner, shared = num_heads * head_dim, n_groups * state_size
        self.head_dim, self.state_size, self.time_step_limit = head_dim, state_size, time_step_limit
        self.sizes = [inner, shared, shared]
        self.num_heads, self.engine = num_heads, engine
        self.in_proj = nn.Linear(hidden_size, 2 * inner + 2 * shared + num_heads, bias=bias)
        self.conv1d = short_conv(inner + 2 * shared, conv_size, conv_bias)
        self.dt_bias = nn.Parameter(inverse_softplus_of_time_steps(num_heads))
        self.A_log = nn.Parameter(torch.arange(1, num_heads + 1, dtype=torch.float32).log())
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = GatedRMSNorm(inner, norm_eps, gate_first=True, groups=n_groups)
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias)

    def _mix(
        self, x: Tensor, key_mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, State | None, ConvState | None]:
        gate, mixed, dt = self.in_proj(x).split([self.sizes[0], sum(self.sizes), self.num_heads], -1)
        mixed, conv = convolve(mixed, self.conv1d, key_mask, state, self.engine, return_state)
        values, B, C = mixed.split(self.sizes, -1)
        values = split_heads(values, self.head_dim)
        dt = F.softplus(wide(dt) + self.dt_bias).clamp(*self.time_step_limit)
        dt = dt.transpose(1, 2)  # (B, H, T)
        out, after = decayed_sums(
            split_heads(C, self.state_size),
            split_heads(B, self.state_size),
            (values * dt.unsqueeze(-1)).to(values.dtype),
            log_decay=-wide(self.A_log).exp()[:, None] * dt,
            scale=1.0,
            enable_gqa=True,
            key_mask=key_mask,
            state=None if state is None else state.rule,
            return_state=return_state,
            engine=self.engine,
        )
        out = (out + values * self.D[:, None, None]).to(values.dtype)
        rows = self.out_proj(self.norm(merge_heads(out), gate))
        return rows, after if return_state else None, conv
