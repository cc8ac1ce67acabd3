"""Shared by the layers of the update rules: state, gated norms, heads, the short convolution."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..functional.causal_conv1d import causal_conv1d
from ..functional.recurrent import EngineName
from ..states import ConvState, State


@dataclass(frozen=True)
class MixerState:
    """The state of one layer: of its short convolution, where it has one, and of its rule."""

    rule: State
    conv: ConvState | None = None

    def clone(self) -> "MixerState":
        """An independent copy."""
        return MixerState(self.rule.clone(), None if self.conv is None else self.conv.clone())

    def detach(self) -> "MixerState":
        """The same state, detached from the autograd graph."""
        return MixerState(self.rule.detach(), None if self.conv is None else self.conv.detach())

    def select(self, batch_index: Tensor | Sequence[int]) -> "MixerState":
        """The states of the given batch entries, as State.select."""
        return MixerState(self.rule.select(batch_index), None if self.conv is None else self.conv.select(batch_index))

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.rule.nbytes + (0 if self.conv is None else self.conv.nbytes)


class TokenMixer(nn.Module):
    """A layer of an update rule: (B, T, hidden_size) -> (B, T, hidden_size), with a state between calls."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        key_mask: Tensor | None = None,
        state: MixerState | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, MixerState]:
        """(B, T, hidden_size) -> (B, T, hidden_size), plus the state with return_state. key_mask: (B, T), False = padding."""
        rows, after, conv = self._mix(hidden_states, key_mask, state, return_state)
        return rows if after is None else (rows, MixerState(after, conv))

    def _mix(
        self, x: Tensor, key_mask: Tensor | None, state: MixerState | None, return_state: bool
    ) -> tuple[Tensor, State | None, ConvState | None]:
        """The output, and with return_state the states of the rule and of the short convolution, if the layer has one."""
        raise NotImplementedError


class RMSNorm(nn.Module):
    """x / sqrt(mean of squares + eps) * weight, computed in float32 at least."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalized(x) * self.weight).to(x.dtype)

    def normalized(self, x: Tensor) -> Tensor:
        x = wide(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class GatedRMSNorm(RMSNorm):
    """RMSNorm whose output, or with gate_first its input, is multiplied by an activation of a gate.

    groups: parts of the channels that are normalized each by itself.
    """

    def __init__(
        self, size: int, eps: float = 1e-6, activation: str = "silu", gate_first: bool = False, groups: int = 1
    ):
        super().__init__(size, eps)
        self.activation, self.gate_first, self.groups = activation, gate_first, groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        gate = F.silu(wide(gate)) if self.activation == "silu" else torch.sigmoid(wide(gate))
        parts = torch.unflatten(x * gate if self.gate_first else x, -1, (self.groups, -1))
        out = self.normalized(parts).flatten(-2) * self.weight
        return (out if self.gate_first else out * gate).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """float64 unchanged, everything else in float32: the dtype for decays and norms."""
    return x if x.dtype == torch.float64 else x.float()


def split_heads(x: Tensor, dim: int) -> Tensor:
    """(B, T, heads * dim) -> (B, heads, T, dim)."""
    return torch.unflatten(x, -1, (-1, dim)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, T, dim) -> (B, T, heads * dim)."""
    return x.transpose(1, 2).flatten(2)


def short_conv(channels: int, width: int, bias: bool = False) -> nn.Conv1d:
    """Weights of a depthwise convolution, with the parameter names of other libraries."""
    return nn.Conv1d(channels, channels, width, groups=channels, padding=width - 1, bias=bias)


def convolve(
    x: Tensor,
    conv: nn.Conv1d,
    key_mask: Tensor | None,
    state: MixerState | None,
    engine: EngineName,
    return_state: bool,
) -> tuple[Tensor, ConvState | None]:
    """silu of a causal convolution, (B, T, channels) -> (B, T, channels). Masked tokens are skipped."""
    found = causal_conv1d(
        x.transpose(1, 2),
        conv.weight.squeeze(1),
        conv.bias,
        activation="silu",
        key_mask=key_mask,
        state=None if state is None else state.conv,
        return_state=return_state,
        engine=engine,
    )
    out, after = found if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), after


def inverse_softplus_of_time_steps(count: int, least: float = 1e-3, most: float = 0.1, floor: float = 1e-4) -> Tensor:
    """A dt_bias whose softplus is spread evenly in the logarithm."""
    span = torch.log(torch.tensor([least, most]))
    dt = (torch.rand(count) * (span[1] - span[0]) + span[0]).exp().clamp_min(floor)
    return dt + torch.log(-torch.expm1(-dt))
