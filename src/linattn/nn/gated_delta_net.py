"""GatedDeltaNet: the gated delta rule as a layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..functional.delta_rule import delta_rule
from ..functional.recurrent import EngineName
from ..states import ConvState, State
from .recurrent import GatedRMSNorm, MixerState, TokenMixer, convolve, merge_heads, short_conv, split_heads, wide


class GatedDeltaNet(TokenMixer):
    """The token mixer of Qwen3-Next, with the parameters of transformers' Qwen3NextGatedDeltaNet.

    >>> import torch
    >>> from linattn.nn import GatedDeltaNet
    >>> layer = GatedDeltaNet(64, num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16)
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])

    Args:
        hidden_size: width of the input and the output.
        num_key_heads, num_value_heads: value heads are a multiple of key heads.
        key_head_dim, value_head_dim: width of one head.
        conv_size: width of the short convolution over queries, keys and values.
        negative_eigenvalues: lets beta go up to 2 instead of 1, so that the state can track parity.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_key_heads: int = 4,
        num_value_heads: int = 8,
        key_head_dim: int = 64,
        value_head_dim: int = 64,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        negative_eigenvalues: bool = False,
        engine: EngineName = "auto",
    ):
        super().__init__()
        if num_value_heads % num_key_heads:
            raise ValueError(f"value heads must be a multiple of key heads, got {num_value_heads} and {num_key_heads}.")
        self.heads = num_key_heads, num_value_heads
        self.head_dims = key_head_dim, value_head_dim
        self.most_beta = 2.0 if negative_eigenvalues else 1.0
        self.engine = engine
        key_dim, value_dim = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        self.sizes = [key_dim, key_dim, value_dim]
        self.in_proj_qkvz = nn.Linear(hidden_size, 2 * key_dim + 2 * value_dim, bias=False)
        self.in_proj_ba = nn.Linear(hidden_size, 2 * num_value_heads, bias=False)
        self.conv1d = short_conv(sum(self.sizes), conv_size)
        self.dt_bias = nn.Parameter(torch.ones(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads).uniform_(0.01, 16).log())
        self.norm = GatedRMSNorm(value_head_dim, norm_eps)
        self.out_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, key_mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, State | None, ConvState | None]:
        mixed, gate, beta, log_decay = self._project(x)
        mixed, conv = convolve(mixed, self.conv1d, key_mask, state, self.engine, return_state)
        query, key, value = mixed.split(self.sizes, -1)
        key_dim, value_dim = self.head_dims
        found = delta_rule(
            split_heads(query, key_dim),
            split_heads(key, key_dim),
            split_heads(value, value_dim),
            beta=beta,
            log_decay=log_decay,
            normalize_qk=True,
            enable_gqa=True,
            key_mask=key_mask,
            state=None if state is None else state.rule,
            return_state=return_state,
            engine=self.engine,
        )
        out, after = found if isinstance(found, tuple) else (found, None)
        rows = self.out_proj(merge_heads(self.norm(out, gate)))
        return rows, after, conv

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """queries, keys and values (B, T, channels), gate (B, H, T, dim), beta and log_decay (B, H, T).

        The projections hold, for each key head, its query, key, values and gates, and its betas and time steps.
        """
        key_heads, value_heads = self.heads
        key_dim, value_dim = self.head_dims
        shared = value_heads // key_heads
        grouped = torch.unflatten(self.in_proj_qkvz(x), -1, (key_heads, -1))
        query, key, value, gate = grouped.split([key_dim, key_dim, shared * value_dim, shared * value_dim], -1)
        b, a = torch.unflatten(self.in_proj_ba(x), -1, (key_heads, -1)).split([shared, shared], -1)
        mixed = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], -1)
        beta = self.most_beta * torch.sigmoid(b.flatten(2))
        log_decay = -wide(self.A_log).exp() * F.softplus(wide(a.flatten(2)) + self.dt_bias)
        return mixed, split_heads(gate.flatten(2), value_dim), beta.transpose(1, 2), log_decay.transpose(1, 2)
