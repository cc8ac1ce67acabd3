"""linattn.parallel.attention: linattn.attention over a sequence that several processes share."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines.call import EngineName
from ..functional import checks, routing
from ..functional.attention import attention as local_attention
from ..functional.decayed_attention import per_channel
from ..functional.normalise import Arguments, read_masks
from ..functional.recurrent import RuleArguments
from ..kernels import Custom, Kernel, KernelName, Precondition, Softmax
from ..kernels.names import constant
from ..nearfar import NearFar
from ..ops.packing import CuSeqlens
from ..states import State
from . import all_tokens
from .causal import Layout, run_causal
from .exchange import connected
from .full import run_full
from .groups import GroupLike, Members, members
from .schedules import Schedule
from .shards import pack_shards, shard_lengths
from .token_rules import SumsRule

# Time of a summary as a share of that of the rows: python benchmarks/parallel.py extra.
SUMS_EXTRA = 0.45
DECAYED_EXTRA = 0.7  # without a denominator


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    kernel: Kernel | KernelName,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    normalize: bool = True,
    log_decay: Tensor | None = None,
    gate: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    state: State | None = None,
    return_state: bool = False,
    engine: EngineName = "auto",
    group: GroupLike = None,
    schedule: Schedule = "auto",
) -> Tensor | tuple[Tensor, State]:
    """linattn.attention over a sequence whose tokens are shared by the processes of a group.

    Every process passes its own shard, a contiguous part of the tokens in the order of the ranks, and gets its rows. Shards
    may differ in length and may be empty. All processes call with the same options; for gradients, all call backward.

    Args:
        query: (..., heads, tokens of this process, dim). Causal calls need as many queries as keys.
        key, value, attn_mask, key_mask, log_decay, gate: of this process's tokens, as in linattn.attention.
        cu_seqlens: bounds of packed sequences over the tokens of ALL processes, the same on each; sequences may cross shards.
        state: the state before the first shard, the same on every process. Gradients go to the first process's, or for
            packed sequences to the state of the process that holds the first token of each.
        return_state: also return the state after the last shard, on every process.
        group: a process group, a 1-D DeviceMesh or one with a dimension called "sequence"; None: all processes.
        schedule: "gather" (all summaries to all), "scan" (states from process to process, by groups of heads), "mixed" (a
            scan that gathers the groups it would wait for), or "auto", whichever is expected to take the least time.
            kernel="nearfar" is spread by heads and kernel="softmax" gathers the keys instead: their bytes grow with the
            tokens.

    Returns:
        (..., heads, tokens of this process, value dim); with return_state, that and the State.
    """
    arguments = Arguments(
        query=query,
        key=key,
        value=value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        kernel=kernel,
        scale=scale,
        key_mask=key_mask,
        enable_gqa=enable_gqa,
        normalize=normalize,
        log_decay=log_decay,
        gate=gate,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=return_state,
        engine=engine,
    )
    who = members(group)
    with routing.routed(None):
        if who.size == 1:
            return _alone(arguments)
        return _over_shards(arguments, who, schedule)


def _alone(arguments: Arguments) -> Tensor | tuple[Tensor, State]:
    options: Any = {name: getattr(arguments, name) for name in Arguments.__dataclass_fields__}
    return local_attention(**options)


def _over_shards(arguments: Arguments, who: Members, schedule: Schedule) -> Tensor | tuple[Tensor, State]:
    if arguments.scale is not None:
        checks.check_scale(arguments.scale)
    checks.check_dropout(arguments.dropout_p)
    batch = checks.check_inputs(arguments.query, arguments.key, arguments.value, arguments.enable_gqa)
    flat = arguments.query.dim() == 2
    if flat:
        arguments = _with_heads(arguments)
    kernel = constant(arguments.kernel, arguments.query)
    who = who.about(
        "attention",
        query=arguments.query,
        kernel=kernel.signature(arguments.scale, arguments.query.shape[-1]),
        is_causal=arguments.is_causal,
        normalize=arguments.normalize,
        **shared_options(arguments, schedule),
        gate=arguments.gate,
    )
    if isinstance(kernel, (NearFar, Softmax)):
        checks.check_sums(kernel, arguments.normalize, arguments.log_decay is not None or arguments.gate is not None)
        out = (
            all_tokens.nearfar(arguments, kernel, who)
            if isinstance(kernel, NearFar)
            else all_tokens.softmax(arguments, who)
        )
        return connected(out.squeeze(-3) if flat else out, arguments.query, arguments.key, arguments.value)
    rule = make_rule(arguments, batch)
    layout = layout_of(arguments.cu_seqlens, arguments.key.shape[-2], arguments.key.device, who)
    if arguments.is_causal:
        if arguments.query.shape[-2] != arguments.key.shape[-2]:
            raise ValueError(
                f"causal attention over shards needs queries and keys of the same tokens, got {arguments.query.shape[-2]} "
                f"queries and {arguments.key.shape[-2]} keys on process {who.rank}."
            )
        out, final = run_causal(
            rule, layout, state=arguments.state, return_state=arguments.return_state, schedule=schedule
        )
    else:
        out, final = run_full(rule, layout, state=arguments.state, return_state=arguments.return_state)
    out = connected(out.squeeze(-3) if flat else out, *rule.tokens.values(), *kernel.parameters())
    return out if final is None else (out, final)


def shared_options(arguments: Arguments | RuleArguments, schedule: Schedule) -> dict[str, object]:
    """What all processes pass alike, by name: a state and a decay or none, the same bounds, the same results."""
    return {
        "log_decay": arguments.log_decay,
        "cu_seqlens": arguments.cu_seqlens,
        "state": arguments.state is not None,
        "return_state": arguments.return_state,
        "schedule": schedule,
    }


def layout_of(cu_seqlens: object, tokens: int, device: torch.device, who: Members) -> Layout:
    """The sequences of every process; asks the others for their numbers of tokens if sequences are packed."""
    if cu_seqlens is None:
        return Layout(who, None)
    if isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 and not isinstance(cu_seqlens[0], int):
        raise ValueError("cu_seqlens over shards must be one list of bounds, for queries and keys alike.")
    return Layout(who, pack_shards(cu_seqlens, shard_lengths(tokens, who, device)))


def _with_heads(arguments: Arguments) -> Arguments:
    """Tokens (T, dim) as one head."""
    one = {name: getattr(arguments, name).unsqueeze(0) for name in ("query", "key", "value")}
    if arguments.log_decay is not None and arguments.log_decay.dim() == 2 and per_channel(arguments):
        one["log_decay"] = arguments.log_decay.unsqueeze(0)
    if arguments.attn_mask is not None:
        one["attn_mask"] = arguments.attn_mask.unsqueeze(0)
    return replace(arguments, **one)


def make_rule(arguments: Arguments, batch: tuple[int, ...]) -> SumsRule:
    """A call with a linear kernel, of these batch dimensions, as a rule."""
    kernel = constant(arguments.kernel, arguments.query)
    heads, tokens = arguments.key.shape[-3:-1]
    found = {"query": arguments.query, "key": arguments.key, "value": arguments.value}
    mask = read_masks(arguments, batch, True, tokens)
    if mask is not None:
        found["key_mask"] = mask.reshape(*batch, tokens)
    if arguments.log_decay is not None:
        channels = per_channel(arguments)
        shape = (*batch, heads, tokens, *((kernel.features_of(arguments.key),) if channels else ()))
        found["log_decay_channels" if channels else "log_decay"] = expanded("log_decay", arguments.log_decay, shape)
    if arguments.gate is not None:
        found["gate"] = expanded("gate", arguments.gate, (*batch, heads, tokens))
    options = {
        "kernel": kernel,
        "scale": arguments.scale,
        "is_causal": arguments.is_causal,
        "normalize": arguments.normalize,
        "enable_gqa": True,
        "return_state": True,
        "engine": arguments.engine,
    }
    return SumsRule(
        function=local_attention,
        tokens=found,
        options=options,
        batch=len(batch),
        extra_work=SUMS_EXTRA if arguments.normalize or arguments.log_decay is None else DECAYED_EXTRA,
        per_head_kernel=_has_heads(kernel),
    )


def expanded(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x in its full shape."""
    try:
        return x.expand(shape)
    except RuntimeError:
        raise ValueError(f"{name} must be {shape} on this process, got {tuple(x.shape)}.") from None


def _has_heads(kernel: Kernel) -> bool:
    """Whether a kernel has weights or constants that differ between heads, or may have."""
    built_in = type(kernel).__module__.startswith("linattn.kernels.")
    tensors: list[Tensor] = [*kernel.parameters(), *kernel.buffers()]
    own = [x for x in tensors if x.dim() > 2]
    means = [m for m in kernel.modules() if isinstance(m, Precondition) and m.query_mean.dim() > 1]
    return bool(own or means) or not built_in or isinstance(kernel, Custom)
