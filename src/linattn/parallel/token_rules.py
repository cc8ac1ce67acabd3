"""linattn.attention with a linear kernel, linattn.delta_rule and decayed sums as rules of parallel.rules."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..engines.native import delta_rule as native_delta_rule
from ..functional.recurrent import RuleArguments, choose, read_call
from ..ops.delta_rule import chunk
from ..ops.delta_rule.call import DeltaRuleCall
from ..ops.delta_rule.transition import transition
from ..states import State
from .messages import Tensors
from .rows import split
from .rules import advance_linear, advance_recurrent

# Dimensions of the arguments that hold heads and tokens, counted from the end; log_decay is per head or per channel.
_HEADS = {"query": -3, "key": -3, "value": -3, "beta": -2, "gate": -2, "log_decay": -2, "log_decay_channels": -3}
_TOKENS = {
    "query": -2,
    "key": -2,
    "value": -2,
    "beta": -1,
    "gate": -1,
    "log_decay": -1,
    "log_decay_channels": -2,
    "key_mask": -1,
}
LOWEST = -1e6  # the exponential of it is 0


def named(tokens: Mapping[str, Tensor]) -> Tensors:
    """By the names of the arguments: log_decay may be per head or per channel."""
    return {name.removesuffix("_channels"): x for name, x in tokens.items()}


@dataclass(frozen=True)
class TokenRule:
    """A function of tokens (..., heads, tokens, dim) and a state.

    Attributes:
        function: linattn.attention, linattn.delta_rule or decayed sums, on this process alone.
        tokens: its arguments that hold tokens. log_decay for each channel is called log_decay_channels.
        options: its other arguments.
    """

    function: Callable[..., tuple[Tensor, State]]
    tokens: Mapping[str, Tensor]
    options: Mapping[str, Any]
    batch: int
    extra_work: float
    per_head_kernel: bool = False  # the kernel has weights for each head: the heads cannot be split
    empties: dict[int, State] = field(default_factory=dict)  # by the number of heads; groups of heads share them

    @property
    def head_dim(self) -> int:
        return -3

    def rows_shape(self) -> tuple[int, ...]:
        query, value = self.tokens["query"].shape, self.tokens["value"].shape
        return (*query[:-3], max(query[-3], value[-3]), query[-2], value[-1])

    def rows_like(self) -> Tensor:
        return self.tokens["query"]

    def parts(self) -> int:
        if self.per_head_kernel:
            return 1
        return math.gcd(*(self.tokens[name].shape[-3] for name in ("query", "key", "value")))

    def split(self, groups: int) -> list[Any]:
        if groups == 1:
            return [self]
        parts = {
            name: split(x, groups, _HEADS[name]) if name in _HEADS else [x] * groups for name, x in self.tokens.items()
        }
        return [replace(self, tokens={name: part[i] for name, part in parts.items()}) for i in range(groups)]

    def run(self, state: State | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, State]:
        if bounds is not None and len(bounds) == 1:  # no sequence at all
            return self._call(self.tokens, None)
        return self._call(self.tokens, state, bounds=bounds)

    def empty(self) -> State:
        heads = self.tokens["query"].shape[-3]
        if heads not in self.empties:
            self.empties[heads] = self._call(self._narrowed(0, 0), None)[1].detach()
        return self.empties[heads]

    def _call(
        self, tokens: Mapping[str, Tensor], state: State | None, bounds: tuple[int, ...] | None = None
    ) -> tuple[Tensor, State]:
        cu_seqlens = None if bounds is None else list(bounds)
        return self.function(**named(tokens), **self.options, cu_seqlens=cu_seqlens, state=state)

    def _narrowed(self, start: int, length: int) -> dict[str, Tensor]:
        return {name: x.narrow(_TOKENS[name], start, length) for name, x in self.tokens.items()}

    def _from(self, start: int) -> dict[str, Tensor]:
        return self._narrowed(start, self.tokens["key"].shape[-2] - start)

    def _total_decay(self, tokens: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The logarithm (..., heads) or (..., heads, channels) of what the tokens multiply an earlier state by."""
        mask = tokens.get("key_mask")
        for name, x in tokens.items():
            if name not in ("log_decay", "log_decay_channels", "gate"):
                continue
            x = (x.double().log() if name == "gate" else x.double()).clamp_min(LOWEST)
            if mask is not None:
                hidden = ~mask.unsqueeze(-2)
                x = x.masked_fill(hidden.unsqueeze(-1) if name == "log_decay_channels" else hidden, 0)
            return x.sum(_TOKENS[name])
        return torch.zeros(like.shape, dtype=torch.float64, device=like.device)


@dataclass(frozen=True)
class SumsRule(TokenRule):
    """Sums of features with or without a denominator, and decayed sums."""

    def identity(self) -> Tensors:
        empty = self.empty()
        return {**empty.tensors(), "decay": self._total_decay(self._narrowed(0, 0), empty.tokens)}

    def summary(self, start: int, state: State | None, *, fresh: bool) -> Tensors:
        tokens = self._from(start)
        if tokens["key"].shape[-2] == 0 and state is None:
            return self.identity()
        after = self.state_after(tokens, state)
        return {**after.tensors(), "decay": self._total_decay(tokens, after.tokens)}

    def state_after(self, tokens: Mapping[str, Tensor], state: State | None) -> State:
        """Without any rows."""
        return self._call({**tokens, "query": tokens["query"][..., :0, :]}, state)[1]

    def read(self, state: State | None, bounds: tuple[int, ...] | None) -> tuple[Tensor, State]:
        """What the queries get from a state alone, without the keys of this process."""
        query, key = self.tokens["query"], self.tokens["key"][..., :0, :]
        given = {"query": query, "key": key, "value": self.tokens["value"][..., :0, :]}
        cu_seqlens = None if bounds is None else (list(bounds), [0] * len(bounds))
        return self.function(**given, **self.options, cu_seqlens=cu_seqlens, state=state)

    def advance(self, state: Tensors, summary: Tensors) -> Tensors:
        return advance_linear(state, summary) if "Z" in state else advance_recurrent(state, summary)


@dataclass(frozen=True)
class DeltaRule(TokenRule):
    """The delta rule: what a shard does to an earlier state is a matrix for each head."""

    def identity(self) -> Tensors:
        S = self.empty().S
        one = torch.eye(S.shape[-2], dtype=S.dtype, device=S.device)
        return {**self.empty().tensors(), "transition": one.expand(*S.shape[:-1], S.shape[-2])}

    def summary(self, start: int, state: State | None, *, fresh: bool) -> Tensors:
        tokens = self._from(start)
        if fresh or tokens["key"].shape[-2] == 0:
            after = self._call(tokens, state)[1] if tokens["key"].shape[-2] or state is not None else self.empty()
            return {**after.tensors(), "transition": self.identity()["transition"]}
        given: Any = {**named(tokens), "normalize_qk": self.options["normalize_qk"], "enable_gqa": True}
        call = read_call("delta_rule", RuleArguments(**given))
        assert isinstance(call.inputs, DeltaRuleCall)
        rule = native_delta_rule.delta_rule if choose(self.options["engine"], call) else chunk.delta_rule
        local, moved = transition(call.inputs, rule)
        after = call.state_after(local)
        return {**after.tensors(), "transition": moved.reshape(*after.S.shape[:-1], after.S.shape[-2])}

    def advance(self, state: Tensors, summary: Tensors) -> Tensors:
        return advance_recurrent(state, summary)
