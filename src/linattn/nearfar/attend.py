"""One call of near/far attention: which form serves it, for each group of kv heads that are treated alike."""

import torch
from torch import Tensor

from ..kernels.base import compute_dtype
from ..kernels.nearfar import NearFar
from .part import Part
from .recall import Kept
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
                memory.kept = Kept.empty(x, len(members), D, M, blocks, kernel.recall_unit, kernel.recall_half)
        tokens, merged = [0] * B, [0] * B
    else:
        held = (state.queries.shape[2], state.queries.shape[-1] - 1)
        if held != (G, D):
            raise ValueError(
                f"this state was made with {held[0]} query heads per kv head of dim {held[1]}; the call has {G} of dim {D}."
            )
        memories = state.split(kernel.budgets(H), groups, recall, kernel.recall_unit)
        tokens, merged = state.tokens.tolist(), state.merged.tolist()
    outs, parts = [], []
    for memory, (size, members) in zip(memories, groups):
        part = Part(kernel, size, memory, tokens, merged)
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
    order = torch.tensor([h for _, members in groups for h in members], device=x.device).argsort()
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)[:, order]
    out = out.reshape(B, heads, L, M)
    if not want_state:
        return out, None
    after = (torch.tensor(n, dtype=torch.int64, device=x.device) for n in (parts[0].tokens, parts[0].merged))
    return out, NearFarState.join(signature, [part.memory for part in parts], groups, *after)
