"""linattn.parallel.delta_rule and decayed sums: update rules over a sequence that several processes share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..engines.call import EngineName
from ..functional import decayed_sums as sums
from ..functional import routing
from ..functional.delta_rule import delta_rule as local_delta_rule
from ..functional.recurrent import RuleArguments
from ..functional.recurrent_checks import check_heads, check_same_tokens
from ..ops.packing import CuSeqlens
from ..states import State
from .attention import DECAYED_EXTRA, expanded, layout_of, shared_options
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
    """linattn.delta_rule over shards of a sequence, under the same rules as linattn.parallel.attention.

    Args:
        query, key, value, beta, log_decay, key_mask: of this process's tokens, as in linattn.delta_rule.
        cu_seqlens, state, return_state, group: as in linattn.parallel.attention.
        schedule: "gather" (states and transition matrices of all to all, about 3.4 times the work of one process), "scan"
            (states from process to process, by groups of heads, with no extra work), "mixed" (as in
            linattn.parallel.attention), or "auto", whichever is expected to take the least time.

    Returns:
        (..., heads, tokens of this process, value dim); with return_state, that and the State.
    """
    arguments = RuleArguments(
        *(query, key, value, beta, log_decay, scale, normalize_qk),
        *(key_mask, enable_gqa, cu_seqlens, state, return_state, engine),
    )
    who = members(group)
    with routing.routed(None):
        if who.size == 1:
            alone: Any = arguments._asdict()
            return local_delta_rule(**alone)
        if not isinstance(beta, Tensor):
            raise TypeError(
                f"beta must be a floating-point tensor (..., value heads, tokens), got {type(beta).__name__}."
            )
        return _over_shards(arguments, who, schedule)


def decayed_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_state: bool = True,
    group: GroupLike = None,
    schedule: Schedule = "auto",
    **options: Any,
) -> tuple[Tensor, State | None]:
    """Decayed sums over shards, for the layers of linattn.nn. The state is None without return_state.

    options: the other arguments of linattn.functional.decayed_sums, as in `delta_rule`.
    """
    arguments = RuleArguments(query, key, value, return_state=return_state, **options)
    who = members(group)
    with routing.routed(None):
        if who.size == 1:
            return sums.decayed_sums(**arguments.of_sums())
        found = _over_shards(arguments, who, schedule)
        return found if isinstance(found, tuple) else (found, None)


class _Decayed(SumsRule):
    def state_after(self, tokens: Mapping[str, Tensor], state: State | None) -> State:
        decay = tokens.get("log_decay", tokens.get("log_decay_channels"))
        return sums.decayed_state(
            tokens["key"], tokens["value"], log_decay=decay, key_mask=tokens.get("key_mask"), state=state
        )


def _over_shards(arguments: RuleArguments, who: Members, schedule: Schedule) -> Tensor | tuple[Tensor, State]:
    tokens, batch, flat = _read(arguments)
    options: dict[str, Any] = {"scale": arguments.scale, "engine": arguments.engine, "enable_gqa": True}
    rule: SumsRule | DeltaRule
    if arguments.beta is None:
        rule = _Decayed(sums.decayed_sums, tokens, options, len(batch), DECAYED_EXTRA)
    else:
        options |= {"normalize_qk": arguments.normalize_qk, "return_state": True}
        rule = DeltaRule(local_delta_rule, tokens, options, len(batch), DELTA_EXTRA)
    who = who.about(
        "decayed_sums" if arguments.beta is None else "delta_rule",
        query=arguments.query,
        scale=arguments.scale,
        normalize_qk=arguments.normalize_qk,
        **shared_options(arguments, schedule),
    )
    layout = layout_of(arguments.cu_seqlens, tokens["key"].shape[-2], tokens["key"].device, who)
    state, return_state = arguments.state, arguments.return_state
    out, final = run_causal(rule, layout, state=state, return_state=return_state, schedule=schedule)
    out = connected(out.squeeze(-3) if flat else out, *tokens.values())
    return out if final is None else (out, final)


def _read(arguments: RuleArguments) -> tuple[Tensors, tuple[int, ...], bool]:
    """Tokens with a head dimension and gates of full shape; the batch dimensions; whether there were no heads."""
    names = ("query", "key", "value", "beta", "log_decay", "key_mask")
    found = {name: x for name in names if (x := getattr(arguments, name)) is not None}
    query, key, value = arguments[:3]
    check_same_tokens(query, key, value)
    flat = query.dim() == 2
    if flat:
        found |= {name: found[name].unsqueeze(0) for name in ("query", "key", "value")}
        if "log_decay" in found and found["log_decay"].dim() == 2:
            found["log_decay"] = found["log_decay"].unsqueeze(0)
        query, key, value = found["query"], found["key"], found["value"]
    batch = check_heads(query, key, value, arguments.enable_gqa)
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
