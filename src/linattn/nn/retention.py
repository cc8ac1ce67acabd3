"""Retention: decayed sums with rotary positions, as a layer."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..functional import routing
from ..functional.decayed_sums import decayed_sums
from ..functional.recurrent import EngineName
from ..states import ConvState, RecurrentState, State
from .recurrent import GatedRMSNorm, MixerState, TokenMixer, merge_heads, split_heads


class Retention(TokenMixer):
    """Multi-scale retention (RetNet), with the parameters of fla's MultiScaleRetention.

    >>> import torch
    >>> from linattn.nn import Retention
    >>> Retention(64, num_heads=4)(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])

    Args:
        hidden_size: width of the input and the output.
        num_heads: head h keeps 1 - 2^(-5 - h) of its state at every token.
        expand_k, expand_v: width of all keys and of all values, in units of hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 8,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        norm_eps: float = 1e-5,
        rope_base: float = 10000.0,
        engine: EngineName = "auto",
    ):
        super().__init__()
        key_dim, value_dim = round(hidden_size * expand_k), round(hidden_size * expand_v)
        if key_dim % (2 * num_heads) or value_dim % num_heads:
            raise ValueError(
                f"{num_heads} heads cannot share keys of width {key_dim} and values of width {value_dim}: both must be "
                "multiples of the heads, and the width of a key head even."
            )
        self.head_dims = key_dim // num_heads, value_dim // num_heads
        self.num_heads, self.rope_base, self.engine = num_heads, rope_base, engine
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.g_proj = nn.Linear(hidden_size, value_dim, bias=False)
        self.g_norm_swish_gate = GatedRMSNorm(self.head_dims[1], norm_eps)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    def _mix(
        self, x: Tensor, key_mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, State | None, ConvState | None]:
        key_dim, value_dim = self.head_dims
        positions = _positions(x, key_mask, state)
        query, key = (
            rotate(split_heads(proj(x), key_dim), positions, self.rope_base) for proj in (self.q_proj, self.k_proj)
        )
        rates = [math.log1p(-(2.0 ** (-5 - h))) for h in range(self.num_heads)]
        log_decay = torch.tensor(rates, device=x.device).unsqueeze(-1).expand(-1, x.shape[1])
        out, after = decayed_sums(
            query,
            key,
            split_heads(self.v_proj(x), value_dim),
            log_decay=log_decay,
            key_mask=key_mask,
            state=None if state is None else state.rule,
            return_state=return_state,
            engine=self.engine,
        )
        gate = split_heads(self.g_proj(x), value_dim)
        rows = self.o_proj(merge_heads(self.g_norm_swish_gate(out, gate)))
        return rows, after if return_state else None, None


def _positions(x: Tensor, key_mask: Tensor | None, state: MixerState | None) -> Tensor:
    """(B, T): tokens before each, masked ones not counted."""
    B, T = x.shape[:2]
    seen = torch.ones(B, T, dtype=torch.bool, device=x.device) if key_mask is None else key_mask.expand(B, T)
    before = seen.cumsum(-1) - seen.long()
    if (router := routing.current()) is not None:  # the tokens of the shards before this one
        before = before + router.tokens_before(seen.sum(-1)).unsqueeze(-1)
    if state is None:
        return before
    tokens = cast(RecurrentState, state.rule).tokens
    if tokens.shape[:-1] != (B,):
        raise ValueError(f"this state has a batch of {tuple(tokens.shape[:-1])}; the call has {B} sequences.")
    return before + tokens[..., :1]


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions: (B, heads, T, dim), coordinates i and i + dim / 2 turned by position / base^(2 i / dim)."""
    half = x.shape[-1] // 2
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    inverse = base ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angle = positions[:, None, :, None].to(dtype) * inverse
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
