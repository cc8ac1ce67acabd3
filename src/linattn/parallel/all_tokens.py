"""Kernels that are no sums: near/far by heads over processes, softmax by gathering the keys."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..functional.attention import attention
from ..functional.normalise import Arguments, read_masks
from ..nearfar import NearFar
from .exchange import tie
from .groups import Members
from .heads import gather_tokens, share, to_heads, to_tokens
from .shards import pack_shards, shard_lengths


def _refuse_state(arguments: Arguments, what: str, why: str) -> None:
    if arguments.state is not None or arguments.return_state:
        raise ValueError(
            f"{what} over several processes takes and returns no state: {why}. Leave out state= and return_state=."
        )


def _flat_batch(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """query, key and value with one batch dimension, the mask (B, S), and the batch dimensions."""
    tensors = arguments.query, arguments.key, arguments.value
    batch = tuple(torch.broadcast_shapes(*(x.shape[:-3] for x in tensors)))
    mask = read_masks(arguments, batch, True, arguments.key.shape[-2])
    entries = math.prod(batch)
    query, key, value = (x.expand(*batch, *x.shape[-3:]).reshape(entries, *x.shape[-3:]) for x in tensors)
    return query, key, value, mask, batch


def nearfar(arguments: Arguments, kernel: NearFar, who: Members) -> Tensor:
    """Each process attends for its share of the kv heads, over all tokens."""
    _refuse_state(arguments, "near/far attention", "each process holds the states of its own heads only")
    query, key, value, mask, batch = _flat_batch(arguments)
    lengths = shard_lengths(key.shape[2], who, key.device)
    queries = shard_lengths(query.shape[2], who, key.device)
    heads = share(key.shape[1], who)
    groups = query.shape[1] // key.shape[1]
    grouped = [groups * h for h in heads]
    q = to_heads(query, grouped, queries, who)
    k, v = (to_heads(x, heads, lengths, who) for x in (key, value))
    if arguments.cu_seqlens is not None:
        pack_shards(arguments.cu_seqlens, lengths)
    seen = mask if mask is not None else torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    visible = gather_tokens(seen[:, None, :, None].to(key.dtype), lengths, who)[:, 0, :, 0].bool()
    mine = heads[who.rank]
    if mine:
        first = sum(heads[: who.rank])
        own = kernel.with_slots(
            kernel.budgets(key.shape[1])[first : first + mine], kernel.recalls(key.shape[1])[first : first + mine]
        )
        if own.positions:
            own = own.of_heads(range(groups * first, groups * (first + mine)))
        local = replace(
            arguments,
            query=q,
            key=k,
            value=v,
            kernel=own,
            attn_mask=None,
            key_mask=None if bool(visible.all()) else visible,
        )
        out = _call(local)
    else:
        out = tie(q.new_zeros(q.shape[0], 0, sum(queries), v.shape[-1]), q.sum(), k.sum(), v.sum())
    out = to_tokens(out, grouped, queries, who)
    return out.reshape(*batch, *out.shape[1:])


def softmax(arguments: Arguments, who: Members) -> Tensor:
    """Each process attends with its queries to all keys, which are gathered: memory and bytes grow with the tokens."""
    _refuse_state(arguments, "softmax", "its state is all keys and values")
    query, key, value, mask, batch = _flat_batch(arguments)
    lengths = shard_lengths(key.shape[2], who, key.device)
    if arguments.is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention over shards needs queries and keys of the same tokens, got {query.shape[2]} queries and "
            f"{key.shape[2]} keys on process {who.rank}."
        )
    before, mine = sum(lengths[: who.rank]), lengths[who.rank]
    k, v = (gather_tokens(x, lengths, who) for x in (key, value))
    seen = mask if mask is not None else torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    visible = gather_tokens(seen[:, None, :, None].to(key.dtype), lengths, who)[:, 0, :, 0].bool()
    first, last, packed = 0, before + mine if arguments.is_causal else sum(lengths), None
    if arguments.cu_seqlens is not None:
        packing = pack_shards(arguments.cu_seqlens, lengths)
        shard = packing.shards[who.rank]
        if shard.sequences:
            bounds = packing.bounds
            first, last = bounds[shard.sequences[0]], min(last, bounds[shard.sequences[-1] + 1])
            keys = [bounds[i] - first for i in shard.sequences] + [last - first]
            packed = list(shard.bounds), keys
    k, v, visible = k[:, :, first:last], v[:, :, first:last], visible[:, first:last]
    local = replace(
        arguments,
        query=query,
        key=k,
        value=v,
        attn_mask=None,
        cu_seqlens=packed,
        key_mask=None if bool(visible.all()) else visible,
    )
    if query.shape[2]:
        out = _call(local)
    else:  # backward must run here too, for the keys that the others gathered
        out = tie(query.new_zeros(*query.shape[:-1], v.shape[-1]), k.sum(), v.sum())
    return out.reshape(*batch, *out.shape[1:])


def _call(arguments: Arguments) -> Tensor:
    options = {name: getattr(arguments, name) for name in Arguments.__dataclass_fields__}
    out: Tensor = attention(**{**options, "return_state": False, "state": None, "enable_gqa": True})
    return out
