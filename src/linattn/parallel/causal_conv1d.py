"""linattn.parallel.causal_conv1d: the short convolution, which needs the last inputs of the shards before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engines.call import EngineName
from ..functional import routing
from ..functional.causal_conv1d import Activation
from ..functional.causal_conv1d import causal_conv1d as local_conv
from ..states import ConvState, State
from .attention import layout_of
from .causal import run_causal
from .exchange import connected
from .groups import GroupLike, members
from .messages import Tensors
from .rules import Rule


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    state: State | None = None,
    return_state: bool = False,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    engine: EngineName = "auto",
    group: GroupLike = None,
) -> Tensor | tuple[Tensor, ConvState]:
    """linattn.causal_conv1d over a sequence whose tokens are shared by the processes of a group.

    Arguments as in linattn.causal_conv1d, with this process's tokens; cu_seqlens, state, return_state and group as in
    linattn.parallel.attention. Shards may be shorter than the convolution.
    """
    options: dict[str, Any] = {"weight": weight, "bias": bias, "activation": activation, "engine": engine}
    who = members(group)
    with routing.routed(None):
        if who.size == 1:
            alone: Any = {"state": state, "return_state": return_state, "key_mask": key_mask, "cu_seqlens": cu_seqlens}
            return local_conv(x, **options, **alone)
        mask = None if key_mask is None else key_mask.expand(*x.shape[:-2], x.shape[-1])
        rule = ConvRule(x, mask, options, x.dim() - 2)
        kept = {"cu_seqlens": cu_seqlens, "state": state is not None, "return_state": return_state}
        who = who.about("causal_conv1d", x=x, activation=activation, bias=bias, **kept)
        layout = layout_of(cu_seqlens, x.shape[-1], x.device, who)
        out, final = run_causal(rule, layout, state=state, return_state=return_state, schedule="gather")
    out = connected(out, x, weight, bias)
    return (out, final) if isinstance(final, ConvState) else out


@dataclass(frozen=True)
class ConvRule:
    """The summary of a shard: its last width - 1 inputs, and how many of them there are."""

    x: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    batch: int
    extra_work: float = 0.0

    @property
    def head_dim(self) -> int:
        return -2

    def rows_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape)

    def rows_like(self) -> Tensor:
        return self.x

    def parts(self) -> int:
        return 1

    def split(self, groups: int) -> list[Rule]:
        return [self]

    def run(self, state: State | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, State]:
        if bounds is not None and len(bounds) == 1:
            bounds = None
        cu_seqlens = None if bounds is None else list(bounds)
        return local_conv(
            self.x, **self.options, key_mask=self.mask, state=state, cu_seqlens=cu_seqlens, return_state=True
        )

    def empty(self) -> ConvState:
        width = self.options["weight"].shape[1]
        return ConvState.empty(tuple(self.x.shape[:-2]), self.x.shape[-2], width, self.x.dtype, self.x.device)

    def identity(self) -> Tensors:
        inputs = self.empty().inputs
        return {"inputs": inputs, "count": torch.zeros(inputs.shape[:-2], dtype=torch.int64, device=inputs.device)}

    def summary(self, start: int, state: State | None, *, fresh: bool) -> Tensors:
        own = self._last_inputs(start)
        if isinstance(state, ConvState):
            own["inputs"] = self.advance({"inputs": state.inputs}, own)["inputs"]
        return own

    def _last_inputs(self, start: int) -> Tensors:
        """The last inputs from `start` on that are not masked, oldest first, with zeros in front."""
        x, wanted = self.x[..., start:], self.options["weight"].shape[1] - 1
        if self.mask is None:
            x = x[..., max(0, x.shape[-1] - wanted) :]
            found = torch.full(x.shape[:-2], x.shape[-1], dtype=torch.int64, device=x.device)
            return {"inputs": torch.nn.functional.pad(x, (wanted - x.shape[-1], 0)), "count": found}
        mask = self.mask[..., start:]
        padded = torch.nn.functional.pad(x.masked_fill(~mask.unsqueeze(-2), 0), (wanted, 0))
        places = torch.arange(1, mask.shape[-1] + 1, device=x.device) * mask  # from 1; 0 for masked tokens
        places = (
            torch.nn.functional.pad(places, (wanted, 0)).topk(wanted, -1).values.flip(-1)
        )  # the last ones, in order
        index = torch.where(places > 0, places + wanted - 1, 0)
        inputs = padded.gather(-1, index.unsqueeze(-2).expand(*x.shape[:-1], wanted))
        return {"inputs": inputs, "count": (places > 0).sum(-1)}

    def advance(self, state: Tensors, summary: Tensors) -> Tensors:
        both = torch.cat([state["inputs"], summary["inputs"]], -1)
        wanted = summary["inputs"].shape[-1]
        place = torch.arange(wanted, device=both.device)
        count = summary["count"].unsqueeze(-1)  # (..., 1)
        index = torch.where(place >= wanted - count, place + wanted, place + count)  # (..., wanted)
        return {"inputs": both.gather(-1, index.unsqueeze(-2).expand(*both.shape[:-1], wanted))}
