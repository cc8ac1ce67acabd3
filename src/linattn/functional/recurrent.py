"""One call of an update rule: arguments of any shape brought into canonical form (see linattn.ops) and back."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines.call import EngineName as EngineName
from ..engines.plan import rule_refusal, serves_natively
from ..kernels.base import compute_dtype
from ..ops.decayed_sums.call import DecayedSumsCall
from ..ops.delta_rule.call import DeltaRuleCall
from ..ops.packing import CuSeqlens, read_packing
from ..states.base import State
from ..states.recurrent import RecurrentState
from .recurrent_checks import (
    check_finite,
    check_heads,
    check_same_tokens,
    read_gate,
    read_log_decay,
    read_mask,
    read_state,
)


class RuleArguments(NamedTuple):
    """The arguments of linattn.delta_rule, as they were given; those of decayed sums have no beta."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor | None = None
    log_decay: Tensor | None = None
    scale: float | None = None
    normalize_qk: bool = False
    key_mask: Tensor | None = None
    enable_gqa: bool = False
    cu_seqlens: CuSeqlens | None = None
    state: State | None = None
    return_state: bool = False
    engine: EngineName = "auto"

    def scale_or_default(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else float(self.scale)

    def of_sums(self) -> dict[str, Any]:
        """Those that decayed sums have, by name."""
        return {name: x for name, x in self._asdict().items() if name not in ("beta", "normalize_qk")}


@dataclass(frozen=True)
class CheckedCall:
    """A call in canonical form, and what its results need to get the caller's dimensions.

    batch: the call's batch dimensions. flat: the tokens came without a head dimension. given: the state that was passed.
    """

    rule: str
    inputs: DeltaRuleCall | DecayedSumsCall
    batch: tuple[int, ...]
    flat: bool
    given: RecurrentState | None

    def run(self, rule: Callable[[Any], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """rows (B, Ho, T, M) and last states (B * n, H, D, M), with autocast disabled."""
        inputs = self.inputs
        if inputs.query.is_meta:
            return self._shapes()
        device = inputs.query.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            out, final = rule(inputs)
        check_finite(out, inputs)
        return out, final

    def _shapes(self) -> tuple[Tensor, Tensor]:
        """For meta tensors: empty results of the right shapes."""
        query, (B, H, T, M) = self.inputs.query, self.inputs.value.shape
        out = query.new_empty(B, max(query.shape[1], H), T, M)
        return out, query.new_empty(B * self.sequences, H, query.shape[-1], M, dtype=compute_dtype(query.dtype))

    @property
    def sequences(self) -> int:
        return 1 if self.inputs.cu_seqlens is None else len(self.inputs.cu_seqlens) - 1

    def rows(self, out: Tensor) -> Tensor:
        """The output with the caller's dimensions."""
        out = out if len(self.batch) == 1 else out.reshape(*self.batch, *out.shape[1:])
        return out.squeeze(-3) if self.flat else out

    def state_after(self, final: Tensor) -> RecurrentState:
        """The state after the call."""
        batch = self.batch if self.inputs.cu_seqlens is None else (*self.batch, self.sequences)
        seen = self._count().reshape(*batch, 1).expand(*batch, final.shape[1])
        tokens = seen.clone() if self.given is None else self.given.tokens + seen
        return RecurrentState(self.rule, final.reshape(*batch, *final.shape[1:]), tokens)

    def _count(self) -> Tensor:
        """Tokens of every sequence that are not masked, (B, n)."""
        value, mask = self.inputs.value, self.inputs.mask
        bounds = [0, value.shape[2]] if self.inputs.cu_seqlens is None else self.inputs.cu_seqlens
        ends = torch.tensor(bounds, device=value.device)
        if mask is None:
            return ends.diff().expand(value.shape[0], -1)
        counted = torch.nn.functional.pad(mask.cumsum(-1), (1, 0))  # (B, T + 1)
        return counted[:, ends].diff(dim=-1)


def read_call(rule: str, arguments: RuleArguments) -> CheckedCall:
    """Checks everything; a ValueError or TypeError says what is wrong."""
    query, key, value, beta, log_decay, _, normalize_qk, key_mask, enable_gqa, cu_seqlens, state, *_ = arguments
    check_same_tokens(query, key, value)
    flat = query.dim() == 2
    if flat:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        if isinstance(log_decay, Tensor) and log_decay.dim() == 2:
            log_decay = log_decay.unsqueeze(0)
    batch = check_heads(query, key, value, enable_gqa)
    tokens = value.shape[-2]
    mask = read_mask(key_mask, batch, tokens, query.device)
    bounds = None
    if cu_seqlens is not None:
        queries, keys = read_packing(cu_seqlens, tokens, tokens)
        if queries.bounds != keys.bounds:
            raise ValueError("cu_seqlens must be one list of bounds: queries and keys are the same tokens here.")
        bounds = list(keys.bounds)
    if beta is not None:
        beta = read_gate("beta", beta, batch, tuple(value.shape[-3:-1]), query)
    if log_decay is not None:
        log_decay = read_log_decay(log_decay, batch, value, query.shape[-1], mask)
    state_batch = batch if bounds is None else (*batch, len(bounds) - 1)
    S = None if state is None else read_state(state, rule, state_batch, query, value)
    given = state if isinstance(state, RecurrentState) else None
    query, key, value = (_one_batch(x.resolve_neg(), batch) for x in (query, key, value))
    rest = log_decay, mask, bounds, S, arguments.scale_or_default()
    inputs: DeltaRuleCall | DecayedSumsCall
    if beta is None:
        inputs = DecayedSumsCall(query, key, value, *rest)
    else:
        inputs = DeltaRuleCall(query, key, value, beta, *rest, normalize_qk)
    return CheckedCall(rule, inputs, batch, flat, given)


def _one_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(B, heads, tokens, dim)."""
    if len(batch) == 1 and x.shape[0] == batch[0]:
        return x
    return x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:])


def choose(engine: str, call: CheckedCall) -> bool:
    """Whether the native engine serves the call; "native" says why if it cannot."""
    return serves_natively(engine, rule_refusal(*call.inputs[:3]))
