"""The parts of the summarizer that are not plain transformer layers: positions, neighbours, one step of a decoder layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linattn import nn as linattn_nn
from linattn.states import State

LOWEST, HIGHEST = 0.25, 16.0  # frequencies in radians per unit of log(1 + position)


class LogPositions(nn.Module):
    """Where a token stands, as sines of log(1 + position): no longest length, and 64k is little further than 1k.

    Order among neighbours, which a logarithm blurs, is the business of `Neighbours`.
    """

    frequencies: Tensor

    def __init__(self, dim: int, count: int = 32):
        super().__init__()
        steps = torch.linspace(0, 1, count // 2)
        self.register_buffer("frequencies", LOWEST * (HIGHEST / LOWEST) ** steps, persistent=False)
        self.project = nn.Linear(2 * len(steps), dim)

    def forward(self, start: int, tokens: int) -> Tensor:  # (tokens, dim)
        places = torch.arange(start, start + tokens, device=self.frequencies.device, dtype=torch.float32)
        angles = places.log1p()[:, None] * self.frequencies
        return self.project(torch.cat([angles.sin(), angles.cos()], -1).to(self.project.weight.dtype))


class Neighbours(nn.Module):
    """Adds to every token a weighted sum of the tokens around it, channel by channel.

    Linear kernels look around softly; this gives every layer the exact order of the nearest tokens, at any length.
    """

    def __init__(self, dim: int, before: int, after: int = 0):
        super().__init__()
        self.before, self.after = before, after
        width = before + 1 + after
        self.weight = nn.Parameter(torch.randn(width, dim) * (0.5 / width**0.5))

    def forward(self, x: Tensor) -> Tensor:  # (B, N, dim) -> (B, N, dim)
        wide = nn.functional.pad(x.mT, (self.before, self.after)).unsqueeze(2)  # (B, dim, 1, N + before + after)
        # A convolution in two dimensions with one row: in one dimension torch's takes three times as long on a CPU.
        mixed = nn.functional.conv2d(wide, self.weight.T[:, None, None], groups=x.shape[-1])
        return x + mixed.squeeze(2).mT


@dataclass
class LayerState:
    """What a decoder layer remembers: its own tokens so far, and the document, compressed once."""

    own: State | None
    document: State

    def select(self, batch_index: Tensor) -> "LayerState":
        own = None if self.own is None else self.own.select(batch_index)
        return LayerState(own, self.document.select(batch_index))


class DecoderLayer(linattn_nn.TransformerDecoderLayer):
    """A decoder layer that can also go on from states, some tokens at a time."""

    def start(self, memory: Tensor, padding: Tensor | None) -> LayerState:
        """The state before the first token: the document's keys and values (B, N, dim) absorbed."""
        nothing = memory[:, :0]
        options = {"key_padding_mask": padding, "need_weights": False, "return_state": True}
        return LayerState(None, self.multihead_attn(nothing, memory, memory, **options)[2])

    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """New tokens (B, T, dim) after those of the state: the same numbers as `forward` on all of them at once."""
        own = state.own

        def look_back(x: Tensor) -> Tensor:
            nonlocal own
            out, _, own = self.self_attn(x, x, x, need_weights=False, is_causal=True, state=own, return_state=True)
            return out

        def look_up(x: Tensor) -> Tensor:
            nothing = x[:, :0]
            return self.multihead_attn(x, nothing, nothing, need_weights=False, state=state.document)[0]

        x = self._add(x, self.norm1, look_back)
        x = self._add(x, self.norm2, look_up)
        x = self._add(x, self.norm3, self._ff_block)
        return x, LayerState(own, state.document)

    def _add(self, x: Tensor, norm: nn.Module, block: Callable[[Tensor], Tensor]) -> Tensor:
        return x + block(norm(x)) if self.norm_first else norm(x + block(x))
