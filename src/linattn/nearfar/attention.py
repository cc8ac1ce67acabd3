"""Near/far attention by the torch engine: any device, with gradients. It decides which form serves a call."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engines.call import Call
from ..kernels.base import compute_dtype
from . import merge as merging
from .bidirectional import Options, cross_attend, self_attend
from .block_attention import attend_exact, attend_state
from .decode import decode
from .kernel import NearFar
from .positions import BlockLayout, Positions, take_tokens, visible_first
from .prefill import prefill
from .state import HeadGroup, NearFarState


def attend(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: NearFarState | None,
    *,
    merge: merging.MergeFunction = merging.merge,
) -> tuple[Tensor, NearFarState | None]:
    """(B, Hq, L, D), (B, H, S, D), (B, H, S, M) -> (B, Hq, L, M), and the state after the keys if the call returns one.

    Causal queries are aligned with the last keys, and see everything before: the state, and further keys. Without
    is_causal, as many queries as keys are taken to be the same tokens, with an exact window on both sides; otherwise, or
    with a state, all queries see the same compressed keys. merge: for calls without is_causal and state.
    """
    kernel, key_mask = kernel_of(call), call.key_mask
    B, heads, L, D = query.shape
    H, M = key.shape[1], value.shape[-1]
    dtype, sqrt_scale = compute_dtype(query.dtype), kernel.logit_scale(D, call.scale) ** 0.5
    x = (query.to(dtype) * sqrt_scale).reshape(B, H, heads // max(1, H), L, D)
    entries = torch.cat([key.to(dtype) * sqrt_scale, value.to(dtype)], -1)
    if key_mask is not None:
        entries = entries.masked_fill(~key_mask[:, None, :, None], 0)
    if call.is_causal or state is not None:
        entries = kernel.stored(entries, D)
    if state is None:
        empty = NearFarState.empty(kernel, call.signature, query, key, value)
        groups = empty.head_groups(kernel, Positions.start(B))
    else:
        groups = state.head_groups(kernel)
    outs, after = [], []
    for group in groups:
        heads_of = slice(None) if len(groups) == 1 else group.heads
        tokens = Tokens(x[:, heads_of], entries[:, heads_of], key_mask)
        if call.is_causal:
            out, group = _causal(kernel, group, tokens, call.return_state)
        elif state is None:
            out = _bidirectional(kernel, group, tokens, merge)
            if call.return_state:  # rows are of the tokens as they are, the state of what it can store
                group = absorb(kernel, group, replace(tokens, entries=kernel.stored(tokens.entries, D)))
        else:
            group = absorb(kernel, group, tokens)
            out = attend_state(group, tokens.query)
        outs.append(out)
        after.append(group)
    rows = in_head_order(outs, after).reshape(B, heads, L, M)
    return rows, NearFarState.from_groups(kernel, call.signature, after) if call.return_state else None


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call for one group of heads: queries (B, H, G, L, D), entries (B, H, S, E), visible (B, S) or None."""

    query: Tensor
    entries: Tensor
    visible: Tensor | None

    @property
    def counts(self) -> list[int]:
        """How many keys of each sequence are visible."""
        B, _, S, _ = self.entries.shape
        if self.visible is None:
            return [S] * B
        counts: list[int] = self.visible.sum(-1).tolist()
        return counts

    def keys(self, start: int, end: int | None = None) -> "Tokens":
        """The same queries with some of the keys."""
        visible = None if self.visible is None else self.visible[:, start:end]
        return Tokens(self.query, self.entries[:, :, start:end], visible)


def kernel_of(call: Call) -> NearFar:
    """The kernel of a near/far call."""
    assert isinstance(call.kernel, NearFar)
    return call.kernel


def absorb(kernel: NearFar, group: HeadGroup, tokens: Tokens) -> HeadGroup:
    """Updates the group from keys; the queries have no positions among them and only supply statistics."""
    x = torch.nn.functional.pad(tokens.query.detach().flatten(2, 3), (0, 1), value=1.0)
    group = replace(group, moments=group.moments + merging.query_moments(x))
    return _advance(kernel, group, None, tokens, attend=False)[1]


def in_head_order(outs: list[Tensor], groups: list[HeadGroup]) -> Tensor:
    """Outputs (B, H, ..) of all groups as one tensor, in the order of the heads."""
    if len(outs) == 1:
        return outs[0]
    order = torch.tensor([h for group in groups for h in group.heads], device=outs[0].device).argsort()
    return torch.cat(outs, 1)[:, order]


def few_queries(kernel: NearFar, budget: int, positions: Positions, queries: int, keys: int) -> bool:
    """True if exact attention is cheaper than prefill for queries at the end of many keys, without a state before them."""
    return queries < keys and kernel.window + budget >= queries and not any(positions.tokens)


def _causal(kernel: NearFar, group: HeadGroup, tokens: Tokens, return_state: bool) -> tuple[Tensor, HeadGroup]:
    """Queries (B, H, G, L, D) at the last of the keys (B, H, S, E): (B, H, G, L, M)."""
    query, L, S = tokens.query, tokens.query.shape[3], tokens.entries.shape[2]
    exact = group.positions.all_exact(kernel, group.budget, tokens.counts)
    few = not return_state and few_queries(kernel, group.budget, group.positions, L, S)
    out = None
    if exact or few:
        out = attend_exact(group, query, tokens.entries, tokens.visible, is_causal=True)
        if not return_state:
            return out, group
    if S > L:
        group = _advance(kernel, group, None, tokens.keys(0, S - L), attend=False)[1]
    early = attend_state(group, query[..., : L - S, :]) if L > S and out is None else None
    late = query[..., max(0, L - S) :, :]
    rows, group = _advance(kernel, group, late, tokens.keys(max(0, S - L)), attend=out is None)
    if out is None:
        assert rows is not None
        out = rows if early is None else torch.cat([early, rows], 3)
    return out, group


def _bidirectional(kernel: NearFar, group: HeadGroup, tokens: Tokens, merge: merging.MergeFunction) -> Tensor:
    """Queries (B, H, G, L, D) that see all keys (B, H, S, E), without a state before them."""
    query, entries, visible = tokens.query, tokens.entries, tokens.visible
    L, S, room = query.shape[3], entries.shape[2], kernel.window + kernel.sinks + group.budget
    if group.positions.all_exact(kernel, group.budget, tokens.counts) or room >= L:
        return attend_exact(group, query, entries, visible, is_causal=False)
    if group.cache is not None:
        raise ValueError(
            "recall serves causal attention, and queries that read a state: without is_causal pass NearFar(recall=0)."
        )
    options = Options(kernel.alpha, merge, group.scores)
    if L != S:
        return cross_attend(query, entries, visible, room, options)
    if visible is None:
        return self_attend(kernel, query, entries, None, group.budget, options)
    order, back = visible_first(visible)
    query, entries = take_tokens(query, order), take_tokens(entries, order)
    return take_tokens(self_attend(kernel, query, entries, visible.gather(1, order), group.budget, options), back)


def _advance(
    kernel: NearFar, group: HeadGroup, query: Tensor | None, tokens: Tokens, *, attend: bool
) -> tuple[Tensor | None, HeadGroup]:
    """Adds keys with their queries, or None: the output if `attend`, 0 for hidden tokens, and the group after them."""
    counts, entries, visible, back = tokens.counts, tokens.entries, tokens.visible, None
    if visible is not None and min([entries.shape[2], *counts]) < entries.shape[2]:
        order, back = visible_first(visible)
        entries = take_tokens(entries, order)
        query = None if query is None else take_tokens(query, order)
    layout = BlockLayout(group.positions, counts, entries.shape[2], kernel.block, entries.device)
    out: Tensor | None
    if max([0, *counts]) == 0:  # no new key, so nothing moves
        out = None if query is None else query.new_zeros(*query.shape[:-1], entries.shape[-1] - query.shape[-1])
    elif query is not None and layout.inside_block:
        out, group = decode(kernel, group, query, entries, layout)
    else:
        out, group = prefill(kernel, group, query, entries, layout, attend=attend)
    if out is None or back is None or visible is None:
        return out, group
    return take_tokens(out, back).masked_fill(~visible[:, None, None, :, None], 0), group
