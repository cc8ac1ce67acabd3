"""linattn.parallel.selective_scan: the scan of Mamba-1 over a sequence that several processes share."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engines.call import EngineName
from ..functional import routing
from ..functional.selective_scan import selective_scan as local_scan
from ..states import ScanState, State
from .causal import Layout, run_causal
from .exchange import connected
from .groups import GroupLike, members
from .messages import Tensors
from .rows import split
from .rules import Rule
from .schedules import Schedule

CHANNELS = {"u": -2, "delta": -2, "z": -2, "A": 0, "D": 0, "delta_bias": 0}


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    state: State | None = None,
    return_state: bool = False,
    engine: EngineName = "auto",
    group: GroupLike = None,
    schedule: Schedule = "auto",
) -> Tensor | tuple[Tensor, ScanState]:
    """linattn.selective_scan over a sequence whose tokens are shared by the processes of a group.

    Arguments as in linattn.selective_scan, with this process's tokens; state, return_state, group and schedule as in
    linattn.parallel.attention.
    """
    given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
    tensors: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    options: dict[str, Any] = {"delta_softplus": delta_softplus, "engine": engine}
    who = members(group)
    with routing.routed(None):
        if who.size == 1:
            return local_scan(**tensors, **options, state=state, return_state=return_state)
        rule = ScanRule(tensors, options, u.dim() - 2)
        layout = Layout(who, None)
        out, final = run_causal(rule, layout, state=state, return_state=return_state, schedule=schedule)
    out = connected(out, *tensors.values())
    if not return_state:
        return out
    assert isinstance(final, ScanState)
    return out, final


@dataclass(frozen=True)
class ScanRule:
    """Channels take the place of heads."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    batch: int
    extra_work: float = 1.9  # a scan of its own, and the sum of the time steps

    @property
    def head_dim(self) -> int:
        return -2

    def rows_shape(self) -> tuple[int, ...]:
        return tuple(self.tensors["u"].shape)

    def rows_like(self) -> Tensor:
        x: Tensor = self.tensors["u"]
        return x

    @property
    def _grouped(self) -> bool:
        return self.tensors["B"].dim() == self.batch + 3 and self.tensors["B"].shape[-3] > 1

    def parts(self) -> int:
        return self.tensors["B"].shape[-3] if self._grouped else self.tensors["u"].shape[-2]

    def split(self, groups: int) -> list[Rule]:
        dims = {**CHANNELS, **({"B": -3, "C": -3} if self._grouped else {})}
        parts = {
            name: split(x, groups, dims[name]) if name in dims else [x] * groups for name, x in self.tensors.items()
        }
        return [replace(self, tensors={name: part[i] for name, part in parts.items()}) for i in range(groups)]

    def run(self, state: State | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, State]:
        return local_scan(**self.tensors, **self.options, state=state, return_state=True)

    def empty(self) -> ScanState:
        u, A = self.tensors["u"], self.tensors["A"]
        dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
        channels, n = A.shape
        return ScanState.empty(tuple(u.shape[:-2]), channels, n, dtype, u.device)

    def identity(self) -> Tensors:
        h = self.empty().h
        return {"h": h, "decay": torch.zeros_like(h)}

    def summary(self, start: int, state: State | None, *, fresh: bool) -> Tensors:
        if self.tensors["u"].shape[-1] == 0 and state is None:
            return self.identity()
        plain = {name: x for name, x in self.tensors.items() if name not in ("D", "z")}
        h = local_scan(**plain, **self.options, state=state, return_state=True)[1].h
        if fresh:
            return {"h": h, "decay": torch.zeros_like(h)}
        return {"h": h, "decay": self._time().unsqueeze(-1) * self.tensors["A"].to(h.dtype)}

    def _time(self) -> Tensor:
        """The sum of the time steps, (..., channels)."""
        delta, bias = self.tensors["delta"], self.tensors.get("delta_bias")
        delta = delta.to(torch.float64 if delta.dtype == torch.float64 else torch.float32)
        delta = delta if bias is None else delta + bias.to(delta.dtype).unsqueeze(-1)
        return (F.softplus(delta) if self.options["delta_softplus"] else delta).sum(-1)

    def advance(self, state: Tensors, summary: Tensors) -> Tensors:
        return {"h": state["h"] * summary["decay"].exp() + summary["h"]}
