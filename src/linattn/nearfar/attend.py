"""One call of near/far attention: which form serves it, for each group of kv heads that are treated alike."""

from typing import Any

import torch
from torch import Tensor

from ..kernels.base import compute_dtype
from ..kernels.nearfar import NearFar
from . import native, slots
from .full import Merge
from .kept import Kept
from .part import Part, fits
from .state import Memory, NearFarState


def attend(
    kernel: NearFar,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: NearFarState | None,
    *,
    is_causal: bool,
    scale: float | None,
    key_mask: Tensor | None,
    signature: str,
    want_state: bool,
    merge: Merge = slots.merge,
) -> tuple[Tensor, NearFarState | None]:
    """(B, Hq, L, D), (B, H, S, D), (B, H, S, M) -> (B, Hq, L, M), and the state after the keys if it is wanted.

    Causal queries stand at the last keys; what came before them, by state or by more keys than queries, is all visible.
    Without is_causal as many queries as keys are taken to be the same tokens, with an exact window on both sides; otherwise,
    or with a state, every query sees the same compressed keys.
    """
    B, heads, L, D = query.shape
    H, M = key.shape[1], value.shape[-1]
    G = heads // max(1, H)
    dtype, root = compute_dtype(query.dtype), kernel.logit_scale(D, scale) ** 0.5
    x = (query.to(dtype) * root).reshape(B, H, G, L, D)
    entries = torch.cat([key.to(dtype) * root, value.to(dtype)], -1)
    if key_mask is not None:
        entries = entries.masked_fill(~key_mask[:, None, :, None], 0)
    groups, recall = kernel.groups(H), kernel.recalls(H)
    samples = kernel.block // kernel.stride
    if state is None:
        memories = [Memory.empty(x, len(hs), G, D, M, kernel.sinks, samples) for _, hs in groups]
        for memory, (_, members) in zip(memories, groups):
            if blocks := max((recall[h] for h in members[:1]), default=0):
                memory.kept = Kept.empty(x, len(members), D, M, blocks, kernel.recall_unit, kernel.recall_bits)
        tokens, merged = [0] * B, [0] * B
    else:
        _check_groups(state, G, D)
        memories = state.split(kernel.budgets(H), groups, recall, kernel.recall_unit)
        tokens, merged = state.tokens.tolist(), state.merged.tolist()
    outs, parts = [], []
    for memory, (size, members) in zip(memories, groups):
        part = Part(kernel, size, memory, tokens, merged, merge)
        pick = slice(None) if len(groups) == 1 else members
        q, e = x[:, pick], entries[:, pick]
        if is_causal:
            outs.append(part.causal(q, e, key_mask, want_state))
        elif state is None:
            outs.append(part.whole(q, e, key_mask))
            if want_state:
                part.absorb(q, e, key_mask)
        else:
            part.absorb(q, e, key_mask)
            outs.append(part.read(q))
        parts.append(part)
    out = _in_order(outs, groups).reshape(B, heads, L, M)
    if not want_state:
        return out, None
    after = (torch.tensor(n, dtype=torch.int64, device=x.device) for n in (parts[0].tokens, parts[0].merged))
    return out, NearFarState.join(signature, [part.memory for part in parts], groups, *after)


def attend_natively(
    kernel: NearFar,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: NearFarState | None,
    *,
    is_causal: bool,
    scale: float | None,
    key_mask: Tensor | None,
    signature: str,
    want_state: bool,
) -> tuple[Tensor, NearFarState | None]:
    """`attend` by the native engine: it walks and merges; torch's own softmax still serves where no key has to be merged."""
    B, heads, L, D = query.shape
    H, S = key.shape[1:3]
    now = native.empty(kernel, signature, query, key, value) if state is None else state
    _check_groups(now, heads // max(1, H), D)
    given: Any = {"scale": scale, "key_mask": key_mask}
    torchs: Any = {"is_causal": is_causal, "signature": signature, "want_state": False, "merge": native.merge, **given}
    if not is_causal:
        if state is not None:
            now = native.absorb(kernel, query, key, value, now, **given)
            return _read(kernel, query, now, scale), now
        out, _ = attend(kernel, query, key, value, None, **torchs)
        return out, native.absorb(kernel, query, key, value, now, **given) if want_state else None
    counts = [S] * B if key_mask is None else key_mask.sum(-1).tolist()
    least = min(kernel.budgets(H), default=0)
    few = L < S and kernel.window + least >= L and not any(now.tokens.tolist()) and not want_state
    late = query[:, :, max(0, L - S) :]
    if few or fits(kernel, least, now.tokens.tolist(), now.merged.tolist(), counts):
        out, _ = attend(kernel, query, key, value, state, **torchs)
        return out, native.causal(kernel, late, key, value, now, attend=False, **given)[1] if want_state else None
    early = [_read(kernel, query[:, :, : L - S], now, scale)] if L > S else []
    rows, now = native.causal(kernel, late, key, value, now, attend=True, **given)
    assert rows is not None
    return torch.cat([*early, rows], 2) if early else rows, now


def _check_groups(state: NearFarState, groups: int, dim: int) -> None:
    held = (state.queries.shape[2], state.queries.shape[-1] - 1)
    if held != (groups, dim):
        raise ValueError(
            f"this state was made with {held[0]} query heads per kv head of dim {held[1]}; the call has {groups} of dim {dim}."
        )


def _read(kernel: NearFar, query: Tensor, state: NearFarState, scale: float | None) -> Tensor:
    """What queries (B, Hq, L, D) get from all keys of a state: (B, Hq, L, M)."""
    B, heads, L, D = query.shape
    H = state.near.shape[1]
    groups, tokens, merged = kernel.groups(H), state.tokens.tolist(), state.merged.tolist()
    x = (query.to(state.near.dtype) * kernel.logit_scale(D, scale) ** 0.5).reshape(B, H, heads // max(1, H), L, D)
    outs = []
    for memory, (size, members) in zip(
        state.split(kernel.budgets(H), groups, kernel.recalls(H), kernel.recall_unit), groups
    ):
        pick = slice(None) if len(groups) == 1 else members
        outs.append(Part(kernel, size, memory, tokens, merged).read(x[:, pick]))
    return _in_order(outs, groups).reshape(B, heads, L, -1)


def _in_order(outs: list[Tensor], groups: list[tuple[int, list[int]]]) -> Tensor:
    """Rows of the groups of kv heads, in the order of the heads."""
    if len(outs) == 1:
        return outs[0]
    order = torch.tensor([h for _, members in groups for h in members], device=outs[0].device).argsort()
    return torch.cat(outs, 1)[:, order]
