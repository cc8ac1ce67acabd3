"""linattn.parallel.delta_rule and decayed sums: update rules over a sequence that several processes share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..engines.call import EngineName
from ..functional import decayed_sums as sums
from ..functional import routing
from ..functional.delta_rule import delta_rule as local_delta_rule
from ..functional.recurrent_checks import check_heads, check_same_tokens
from ..ops.packing import CuSeqlens
from ..states import State
from .attention import DECAYED_EXTRA, expanded, layout_of
from .causal import run_causal
from .exchange import connected
from .groups import GroupLike, Members, members
from .messages import Tensors
from .schedules import Schedule
from .token_rules import DeltaRule, SumsRule

DELTA_EXTRA = 2.4  # time of a summary as a share of that of the rows: python benchmarks/parallel.py extra


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    state: State | None = None,
    return_state: bool = False,
    engine: EngineName = "auto",
    group: GroupLike = None,
    schedule: Schedule = "auto",
) -> Tensor | tuple[Tensor, State]:
    """linattn.delta_rule over a sequence whose tokens are shared by the processes of a group.

    Every process passes its own shard, a contiguous part of the tokens in the order of the ranks, and gets its rows. Shards
    may differ in length and may be empty. All processes call with the same options; for gradients, all call backward.

    Args:
        query, key, value, beta, log_decay, key_mask: of this process's tokens, as in linattn.delta_rule.
        cu_seqlens: bounds of packed sequences over the tokens of ALL processes, the same on each; sequences may cross shards.
        state: the state before the first shard, the same on every process.
        return_state: also return the state after the last shard, on every process.
        group: a process group, a 1-D DeviceMesh or one with a dimension called "sequence"; None: all processes.
        schedule: "gather" (states and transition matrices of all to all, about 3.4 times the work of one process), "scan"
            (states from process to process, by groups of heads, with no extra work), "mixed" (as in
            linattn.parallel.attention), or "auto", whichever is expected to take the least time.

    Returns:
        (..., heads, tokens of this process, value dim); with return_state, that and the State.
    """
    options: dict[str, Any] = {"scale": scale, "normalize_qk": normalize_qk, "enable_gqa": enable_gqa, "engine": engine}
    tokens: dict[str, Any] = {"query": query, "key": key, "value": value, "beta": beta}
    tokens |= {"log_decay": log_decay, "key_mask": key_mask}
    who = members(group)
    with routing.routed(None):
        if who.size == 1:
            return local_delta_rule(**tokens, **options, cu_seqlens=cu_seqlens, state=state, return_state=return_state)
        if not isinstance(beta, Tensor):
            raise TypeError(
                f"beta must be a floating-point tensor (..., value heads, tokens), got {type(beta).__name__}."
            )
        read, batch, flat = _read(tokens, enable_gqa)
        rule = DeltaRule(
            function=local_delta_rule,
            tokens=read,
            options={**options, "enable_gqa": True, "return_state": True},
            batch=len(batch),
            extra_work=DELTA_EXTRA,
        )
        return _run(rule, who, flat, cu_seqlens, state, return_state, schedule)


def decayed_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    state: State | None = None,
    return_state: bool = True,
    engine: EngineName = "auto",
    group: GroupLike = None,
    schedule: Schedule = "auto",
) -> tuple[Tensor, State | None]:
    """Decayed sums over shards, for the layers of linattn.nn: arguments as in `delta_rule`. The state is None without
    return_state."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "engine": engine}
    tokens: dict[str, Any] = {"query": query, "key": key, "value": value, "log_decay": log_decay, "key_mask": key_mask}
    who = members(group)
    with routing.routed(None):
        if who.size == 1:
            return sums.decayed_sums(**tokens, **options, cu_seqlens=cu_seqlens, state=state)
        read, batch, flat = _read(tokens, enable_gqa)
        rule = _Decayed(
            function=sums.decayed_sums,
            tokens=read,
            options={**options, "enable_gqa": True},
            batch=len(batch),
            extra_work=DECAYED_EXTRA,
        )
        found = _run(rule, who, flat, cu_seqlens, state, return_state, schedule)
        return found if isinstance(found, tuple) else (found, None)


class _Decayed(SumsRule):
    def state_after(self, tokens: Mapping[str, Tensor], state: State | None) -> State:
        decay = tokens.get("log_decay", tokens.get("log_decay_channels"))
        return sums.decayed_state(
            tokens["key"], tokens["value"], log_decay=decay, key_mask=tokens.get("key_mask"), state=state
        )


def _read(tokens: Mapping[str, Tensor | None], enable_gqa: bool) -> tuple[Tensors, tuple[int, ...], bool]:
    """Tokens with a head dimension and gates of full shape; the batch dimensions; whether there were no heads."""
    found = {name: x for name, x in tokens.items() if x is not None}
    query, key, value = found["query"], found["key"], found["value"]
    check_same_tokens(query, key, value)
    flat = query.dim() == 2
    if flat:
        found |= {name: found[name].unsqueeze(0) for name in ("query", "key", "value")}
        if "log_decay" in found and found["log_decay"].dim() == 2:
            found["log_decay"] = found["log_decay"].unsqueeze(0)
        query, key, value = found["query"], found["key"], found["value"]
    batch = check_heads(query, key, value, enable_gqa)
    heads, count = value.shape[-3:-1]
    for name in ("beta", "log_decay"):
        if name not in found:
            continue
        x = found.pop(name)
        channels = name == "log_decay" and x.dim() == len(batch) + 3
        shape = (*batch, heads, count, *((query.shape[-1],) if channels else ()))
        found[f"{name}_channels" if channels else name] = expanded(name, x, shape)
    if "key_mask" in found:
        mask = found["key_mask"]
        if mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be a bool tensor (batch, tokens), True = use the token, got {mask.dtype}.")
        found["key_mask"] = expanded("key_mask", mask, (*batch, count))
    return found, batch, flat


def _run(
    rule: SumsRule | DeltaRule,
    who: Members,
    flat: bool,
    cu_seqlens: CuSeqlens | None,
    state: State | None,
    return_state: bool,
    schedule: Schedule,
) -> Tensor | tuple[Tensor, State]:
    layout = layout_of(cu_seqlens, rule.tokens["key"].shape[-2], rule.tokens["key"].device, who)
    out, final = run_causal(rule, layout, state=state, return_state=return_state, schedule=schedule)
    out = connected(out.squeeze(-3) if flat else out, *rule.tokens.values())
    if not return_state:
        return out
    assert final is not None
    return out, final
