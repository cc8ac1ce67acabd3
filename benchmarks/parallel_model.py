"""The layers that benchmarks/parallel.py measures, and a model of what many machines would do with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linattn.parallel.delta_rule import DELTA_EXTRA
from linattn.parallel.rules import Rule
from linattn.parallel.schedules import Plan, duration, plan

SCHEDULES = ("gather", "scan", "mixed")
LATENCY = 50e-6  # seconds for a message between machines


@dataclass(frozen=True)
class Layer:
    """One layer: sizes of a state, in numbers of float32, and how it is called.

    state: floats of a head that a state hands on. transition: further floats of a summary. counts: further int64 and float64
    numbers of a state, and of a summary beside them.
    """

    kind: str
    heads: int
    dim: int
    state: int
    transition: int
    counts: tuple[int, int]
    kernel: Any = "elu"

    def narrowed(self) -> "Layer":
        """With two heads, for sequences that one process can just hold."""
        return replace(self, heads=2)

    def plan(self, machines: int, schedule: str = "auto", extra_work: float | None = None) -> Plan:
        extra = self.rule(64).extra_work if extra_work is None else extra_work
        return plan(schedule, self.heads, machines, extra)  # type: ignore[arg-type]

    # What the processes exchange ------------------------------------------------------------------------------------

    def bytes(self, machines: int, schedule: str, way: str) -> int:
        """Received by a machine for the rows (forward) or the gradients (backward) of the layer."""
        planned = self.plan(machines, schedule)
        heads, handed = self.heads // planned.groups, planned.groups - planned.gathered
        gathered = planned.gathered * (machines - 1) * self._message(heads, way, summary=True)
        return gathered + handed * self._message(heads, way, summary=False)

    def _message(self, heads: int, way: str, *, summary: bool) -> int:
        """Bytes of the state of some heads, or of a summary."""
        floats = 4 * heads * (self.state + (self.transition if summary and way == "forward" else 0))
        scale = 4 * heads if self.kind == "sums" else 0  # log_scale
        counts = scale + -scale % 8
        if way == "forward":
            counts += 8 * heads * (self.counts[0] + (self.counts[1] if summary else 0))
        return 8 + floats + -floats % 8 + counts

    # How it is called -------------------------------------------------------------------------------------------------

    def call(self, tokens: int, grad: bool = False) -> Callable[..., Tensor]:
        """A call of the layer on that many tokens; its argument is linattn or linattn.parallel."""
        tensors = self._tensors(tokens, grad)
        if self.kind == "delta":
            beta = torch.rand(1, self.heads, tokens)
            decay = -torch.rand(1, self.heads, tokens) * 0.1
            return lambda where, **o: where.delta_rule(*tensors, beta=beta, log_decay=decay, normalize_qk=True, **o)
        if self.kind == "scan":
            x, A, mixing = tensors[0], -torch.rand(self.heads, self.dim), torch.randn(1, self.dim, tokens)
            return lambda where, **o: where.selective_scan(x, x, A, mixing, mixing, delta_softplus=True, **o)
        options: dict[str, Any] = {"kernel": self.kernel, "is_causal": True}
        if self.kind == "decayed":
            options |= {"normalize": False, "log_decay": -torch.rand(1, self.heads, tokens) * 0.1}
        return lambda where, **o: where.attention(*tensors, **options, **o)

    def _tensors(self, tokens: int, grad: bool) -> list[Tensor]:
        torch.manual_seed(0)
        shape = (1, self.heads, tokens) if self.kind == "scan" else (1, self.heads, tokens, self.dim)
        return [torch.randn(shape, requires_grad=grad) for _ in range(1 if self.kind == "scan" else 3)]

    def rule(self, tokens: int) -> Rule:
        """The layer as linattn.parallel sees it on one process."""
        import linattn
        from linattn.functional.normalise import Arguments
        from linattn.parallel import attention, delta_rule, selective_scan  # noqa: F401
        from linattn.parallel.attention import make_rule
        from linattn.parallel.selective_scan import ScanRule
        from linattn.parallel.token_rules import DeltaRule

        q, *others = self._tensors(tokens, False)
        if self.kind == "scan":
            mixing = torch.randn(1, self.dim, tokens)
            tensors = {"u": q, "delta": q, "A": -torch.rand(self.heads, self.dim), "B": mixing, "C": mixing}
            return ScanRule(tensors, {"delta_softplus": True, "engine": "auto"}, 1)
        k, v = others
        gate = -torch.rand(1, self.heads, tokens) * 0.1
        if self.kind == "delta":
            tensors = {"query": q, "key": k, "value": v, "beta": torch.rand(1, self.heads, tokens), "log_decay": gate}
            options = {"normalize_qk": True, "engine": "auto", "enable_gqa": True, "return_state": True, "scale": None}
            return DeltaRule(linattn.delta_rule, tensors, options, 1, DELTA_EXTRA)
        decayed = self.kind == "decayed"
        given = dict.fromkeys(Arguments.__dataclass_fields__)
        given |= {"query": q, "key": k, "value": v, "kernel": self.kernel, "is_causal": True, "normalize": not decayed}
        given |= {"log_decay": gate if decayed else None, "engine": "auto", "enable_gqa": True, "dropout_p": 0.0}
        return make_rule(Arguments(**given), (1,))  # type: ignore[arg-type]


LAYERS = {
    "sums (elu)": Layer("sums", 16, 64, 64 * 64 + 64, 0, (2, 1)),
    "sums (positive)": Layer("sums", 16, 64, 256 * 64 + 256, 0, (2, 1), "positive"),
    "decayed sums": Layer("decayed", 16, 64, 64 * 64, 0, (1, 1), "identity"),
    "delta rule": Layer("delta", 16, 64, 64 * 64, 64 * 64, (1, 0)),
    "selective scan": Layer("scan", 1024, 16, 16, 16, (0, 0)),
}


def predict(
    rates: dict[str, tuple[float, float]], machines: int, total: int, gigabits: float, cores: int
) -> dict[str, Any]:
    """Prints and returns, for each layer, how long its forward pass takes on many machines.

    rates: tokens per second of one core here, and the time of a summary as a share of that of the rows.
    Work and waiting are those of linattn.parallel.schedules.duration. Bytes arrive while heads are summarised, so only what
    takes longer than that counts.
    """
    record: dict[str, Any] = {}
    print(
        f"\n{machines} machines of {cores} cores, {gigabits:g} Gbit/s, {total} tokens, one layer, forward:\n"
        f"{'layer':20} {'one machine':>12} {'schedule':>9} {'MiB received':>13} {'exchange':>10} {'time':>9} {'speedup':>8} "
        f"{'of ideal':>9}"
    )
    for name, (rate, share) in rates.items():
        layer = LAYERS[name]
        alone = total / (rate * cores)
        work = alone / machines
        chosen = layer.plan(machines, "auto", share)
        for schedule in SCHEDULES:
            received = layer.bytes(machines, schedule, "forward")
            planned = layer.plan(machines, schedule)
            messages = planned.gathered * (machines - 1) + planned.groups - planned.gathered
            exchange = received * 8 / (gigabits * 1e9) + LATENCY * min(messages, machines - 1)
            hidden = work * share * planned.gathered / planned.groups
            waiting = LATENCY * machines if planned.gathered < planned.groups else 0.0
            time = work * duration(planned, machines, share) + max(0.0, exchange - hidden) + waiting
            mark = "*" if planned == chosen else " "
            print(
                f"{name:20} {alone:10.2f} s {schedule:>8}{mark} {received / 2**20:13.2f} {exchange * 1e3:7.2f} ms "
                f"{time * 1e3:6.1f} ms {alone / time:8.1f} {alone / time / machines:9.2f}"
            )
            record[f"{name}/{schedule}"] = {
                "received": received,
                "exchange": exchange,
                "time": time,
                "speedup": alone / time,
            }
    print('* what schedule="auto" takes')
    return record
