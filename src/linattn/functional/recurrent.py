"""One call of an update rule: arguments of any shape brought into canonical form (see linattn.ops) and back."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engines.call import EngineName as EngineName
from ..engines.plan import rule_refusal, serves_natively
from ..kernels.base import compute_dtype
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

Rule = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Call:
    """Checked arguments of a rule, in canonical form.

    batch: the call's batch dimensions. flat: the tokens came without a head dimension. given: the state that was passed.
    """

    rule: str
    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    mask: Tensor | None
    bounds: list[int] | None
    state: Tensor | None
    batch: tuple[int, ...]
    flat: bool
    given: RecurrentState | None

    def run(self, rule: Rule, **options: float | bool) -> tuple[Tensor, Tensor]:
        """rows (B, Ho, T, M) and last states (B * n, H, D, M), with autocast disabled."""
        gates = (self.log_decay,) if self.beta is None else (self.beta, self.log_decay)
        tokens = self.query, self.key, self.value
        if self.query.is_meta:
            return self._shapes()
        device = self.query.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            out, final = rule(*tokens, *gates, self.mask, self.bounds, self.state, **options)
        named = {"query": self.query, "key": self.key, "value": self.value, "beta": self.beta}
        check_finite(out, self.mask, **named, log_decay=self.log_decay, **{"the state's S": self.state})
        return out, final

    def _shapes(self) -> tuple[Tensor, Tensor]:
        """For meta tensors: empty results of the right shapes."""
        B, H, T, M = self.value.shape
        out = self.query.new_empty(B, max(self.query.shape[1], H), T, M)
        dtype = compute_dtype(self.query.dtype)
        return out, self.query.new_empty(B * self.sequences, H, self.query.shape[-1], M, dtype=dtype)

    @property
    def sequences(self) -> int:
        return 1 if self.bounds is None else len(self.bounds) - 1

    def rows(self, out: Tensor) -> Tensor:
        """The output with the caller's dimensions."""
        out = out if len(self.batch) == 1 else out.reshape(*self.batch, *out.shape[1:])
        return out.squeeze(-3) if self.flat else out

    def state_after(self, final: Tensor) -> RecurrentState:
        """The state after the call."""
        batch = self.batch if self.bounds is None else (*self.batch, self.sequences)
        seen = self._count().reshape(*batch, 1).expand(*batch, final.shape[1])
        tokens = seen.clone() if self.given is None else self.given.tokens + seen
        return RecurrentState(self.rule, final.reshape(*batch, *final.shape[1:]), tokens)

    def _count(self) -> Tensor:
        """Tokens of every sequence that are not masked, (B, n)."""
        B, T = self.value.shape[0], self.value.shape[2]
        bounds = [0, T] if self.bounds is None else self.bounds
        ends = torch.tensor(bounds, device=self.query.device)
        if self.mask is None:
            return ends.diff().expand(B, -1)
        counted = torch.nn.functional.pad(self.mask.cumsum(-1), (1, 0))  # (B, T + 1)
        return counted[:, ends].diff(dim=-1)


def read_call(
    rule: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None,
    key_mask: Tensor | None,
    enable_gqa: bool,
    cu_seqlens: CuSeqlens | None,
    state: State | None,
    beta: Tensor | None = None,
) -> Call:
    """Checks everything; a ValueError or TypeError says what is wrong."""
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
    return Call(rule, query, key, value, beta, log_decay, mask, bounds, S, batch, flat, given)


def _one_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(B, heads, tokens, dim)."""
    if len(batch) == 1 and x.shape[0] == batch[0]:
        return x
    return x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:])


def choose(engine: str, call: Call) -> bool:
    """Whether the native engine serves the call; "native" says why if it cannot."""
    return serves_natively(engine, rule_refusal(call.query, call.key, call.value))
