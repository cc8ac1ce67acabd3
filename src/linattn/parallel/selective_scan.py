"""linattn.parallel.selective_scan: the scan of Mamba-1 over a sequence that several processes share."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engines.call import EngineName
from ..functional import routing
from ..functional.selective_scan import selective_scan as local_scan
from ..ops.selective_scan.call import SelectiveScanCall
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
    call = SelectiveScanCall(u, delta, A, B, C, D, z, delta_bias, delta_softplus=delta_softplus)
    who = members(group)
    rule = ScanRule(call, engine)
    with routing.routed(None):
        if who.size == 1:
            out, last = rule.run(state, None)
            return (out, last) if return_state else out
        options: Any = {"z": z, "D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        options |= {"state": state is not None, "return_state": return_state, "schedule": schedule}
        layout = Layout(who.about("selective_scan", u=u, **options), None)
        out, final = run_causal(rule, layout, state=state, return_state=return_state, schedule=schedule)
    out = connected(out, *call[:8])
    return (out, final) if isinstance(final, ScanState) else out


@dataclass(frozen=True)
class ScanRule:
    """Channels take the place of heads. call: with the shapes of linattn.selective_scan's arguments, without a state."""

    call: SelectiveScanCall
    engine: EngineName
    extra_work: float = 1.9  # a scan of its own, and the sum of the time steps

    @property
    def batch(self) -> int:
        return self.call.u.dim() - 2

    @property
    def head_dim(self) -> int:
        return -2

    def rows_shape(self) -> tuple[int, ...]:
        return tuple(self.call.u.shape)

    def rows_like(self) -> Tensor:
        return self.call.u

    @property
    def _grouped(self) -> bool:
        return self.call.B.dim() == self.batch + 3 and self.call.B.shape[-3] > 1

    def parts(self) -> int:
        return self.call.B.shape[-3] if self._grouped else self.call.u.shape[-2]

    def split(self, groups: int) -> list[Rule]:
        dims = {**CHANNELS, **({"B": -3, "C": -3} if self._grouped else {})}
        given = {name: x for name, x in self.call._asdict().items() if name in dims and x is not None}
        parts: dict[str, Any] = {name: split(x, groups, dims[name]) for name, x in given.items()}
        return [
            replace(self, call=self.call._replace(**{name: part[i] for name, part in parts.items()}))
            for i in range(groups)
        ]

    def run(self, state: State | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, ScanState]:
        return self._scan(self.call, state)

    def _scan(self, call: SelectiveScanCall, state: State | None) -> tuple[Tensor, ScanState]:
        given: Any = {**call._asdict(), "state": state}
        return local_scan(**given, return_state=True, engine=self.engine)

    def empty(self) -> ScanState:
        u, (channels, n) = self.call.u, self.call.A.shape
        dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
        return ScanState.empty(tuple(u.shape[:-2]), channels, n, dtype, u.device)

    def identity(self) -> Tensors:
        h = self.empty().h
        return {"h": h, "decay": torch.zeros_like(h)}

    def summary(self, start: int, state: State | None, *, fresh: bool) -> Tensors:
        if self.call.u.shape[-1] == 0 and state is None:
            return self.identity()
        h = self._scan(self.call._replace(D=None, z=None), state)[1].h
        if fresh:
            return {"h": h, "decay": torch.zeros_like(h)}
        return {"h": h, "decay": self._time().unsqueeze(-1) * self.call.A.to(h.dtype)}

    def _time(self) -> Tensor:
        """The sum of the time steps, (..., channels)."""
        delta, bias = self.call.delta, self.call.delta_bias
        delta = delta.to(torch.float64 if delta.dtype == torch.float64 else torch.float32)
        delta = delta if bias is None else delta + bias.to(delta.dtype).unsqueeze(-1)
        return (F.softplus(delta) if self.call.delta_softplus else delta).sum(-1)

    def advance(self, state: Tensors, summary: Tensors) -> Tensors:
        return {"h": state["h"] * summary["decay"].exp() + summary["h"]}
