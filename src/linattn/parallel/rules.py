"""One interface for all rules: what a process must know of one to run its own tokens and to summarise them for others."""

from typing import Protocol

import torch
from torch import Tensor

from ..states import State
from ..states.recurrent import apply_transition
from .messages import Tensors


class Rule(Protocol):
    """The tokens of this process under one rule, or a group of their heads.

    A summary holds the tensors of the state after these tokens, and what they do to an earlier state.

    Attributes:
        batch: number of batch dimensions of the call; a state of packed sequences has one more.
        extra_work: time of `summary` as a share of the time of `run`.
    """

    @property
    def batch(self) -> int: ...

    @property
    def extra_work(self) -> float: ...

    def run(self, state: State | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, State]:
        """The rows of this process from the state before its tokens, and the state after them."""
        ...

    def summary(self, start: int, state: State | None, *, fresh: bool) -> Tensors:
        """Of the tokens from `start` on, from a state. fresh: nothing comes before, so their effect on it is not needed."""
        ...

    def identity(self) -> Tensors:
        """The summary of no tokens."""
        ...

    def advance(self, state: Tensors, summary: Tensors) -> Tensors:
        """The state after tokens with that summary."""
        ...

    def empty(self) -> State:
        """The state before any token."""
        ...

    def parts(self) -> int:
        """The most groups that the heads can be split into."""
        ...

    def split(self, groups: int) -> "list[Rule]":
        """The same tokens, with a share of the heads each."""
        ...

    @property
    def head_dim(self) -> int:
        """The dimension of the rows that `split` divides, counted from the end."""
        ...

    def rows_shape(self) -> tuple[int, ...]:
        """Of what `run` returns."""
        ...

    def rows_like(self) -> Tensor:
        """An argument with the dtype and device of the rows."""
        ...


def rebuilt(like: State, tensors: Tensors) -> State:
    """A state of the same kind from other tensors."""
    return type(like)(like.kernel, **{name: tensors[name] for name in like.tensors()})


def split_state(state: State, groups: int) -> list[State]:
    """By heads: the first dimension that a tensor has after the batch."""
    if groups == 1:
        return [state]
    parts = {name: x.chunk(groups, x.dim() - len(state.table[name].dims)) for name, x in state.tensors().items()}
    return [rebuilt(state, {name: part[i] for name, part in parts.items()}) for i in range(groups)]


def join_states(states: list[State]) -> State:
    """The inverse of `split_state`."""
    first = states[0]
    if len(states) == 1:
        return first
    parts = [state.tensors() for state in states]
    dims = {name: x.dim() - len(first.table[name].dims) for name, x in parts[0].items()}
    return rebuilt(first, {name: torch.cat([part[name] for part in parts], dim) for name, dim in dims.items()})


def stack_states(states: list[State], dim: int) -> State:
    """States of single sequences as one state of packed sequences."""
    parts = [state.tensors() for state in states]
    return rebuilt(states[0], {name: torch.stack([part[name] for part in parts], dim) for name in parts[0]})


def advance_linear(state: Tensors, summary: Tensors) -> Tensors:
    """Sums with a scale of their own: S, Z, log_scale, and the logarithm `decay` of what multiplies earlier sums."""
    earlier, later, decay = state["log_scale"].double(), summary["log_scale"].double(), summary["decay"]
    top = torch.maximum(earlier + decay.detach(), later)
    safe = top.masked_fill(top == -torch.inf, 0)
    first, second = (earlier + decay - safe).exp(), (later - safe).exp()

    def mix(name: str) -> Tensor:
        a, b = state[name], summary[name]
        shape = (*top.shape, *(1,) * (a.dim() - top.dim()))
        return (a.double() * first.reshape(shape) + b.double() * second.reshape(shape)).to(a.dtype)

    counts = {name: state[name] + summary[name] for name in ("tokens", "guarded")}
    return {"S": mix("S"), "Z": mix("Z"), "log_scale": top.to(state["log_scale"].dtype), **counts}


def advance_recurrent(state: Tensors, summary: Tensors) -> Tensors:
    """S of decayed sums, with the logarithm `decay` of their decays, or of the delta rule, with its `transition` matrix."""
    S = state["S"]
    moved = summary["transition"] if "transition" in summary else summary["decay"].exp()
    return {"S": apply_transition(S, moved.to(S.dtype)) + summary["S"], "tokens": state["tokens"] + summary["tokens"]}
