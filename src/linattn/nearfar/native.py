"""Near/far attention by the native engine: whole calls, single tokens, and keys for queries that have no place.

Merges happen at the same absolute positions as in the torch engine, by the same rule, so a state may go from one engine to
the other; where two costs are equal to the last bits the plans may differ.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines import native
from ..engines.native.calls import NotFiniteError, ordinary
from ..kernels.nearfar import NearFar
from ..sums import finite
from .state import Memory, NearFarState, slots_of


def refusal(kernel: NearFar, query: Tensor, key: Tensor, value: Tensor, state: Any) -> str | None:
    """Why the native engine cannot serve this call of near/far attention, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile needs torch's own operators for near/far attention"
    if kernel.recall:
        return "near/far attention with recall has no native form"
    tensors = [query, key, value, *(() if state is None else state.tensors().values())]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "near/far attention is trained through torch's own operators"
    if state is not None and not (state.near.dtype == torch.float32 and state.near.is_cpu):
        return f"the state is {state.near.dtype} on {state.near.device}, and it takes float32 on CPUs"
    return None


def walk(
    kernel: NearFar,
    scale: float | None,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    state: NearFarState,
    attend: bool,
    spare: int = 0,
) -> tuple[Tensor | None, NearFarState]:
    """Goes on by tokens in position: rows (B, Hq, L, M) if they attend, and the state after them.

    spare: places behind its near tokens, for the single tokens that come next.
    """
    B, H, L, D = key.shape
    seen, merged = state.tokens.tolist(), state.merged.tolist()
    counts = [L] * B if mask is None else mask.sum(-1).tolist()
    if max(counts, default=0) == 0:
        heads = 0 if query is None else query.shape[1]
        return value.new_zeros(B, heads, L, value.shape[-1], dtype=torch.float32) if attend else None, state
    budgets = kernel.budgets(H)
    held = state.slots.shape[1]
    grown = [_grown(kernel, size, c, seen, counts, merged) for size, c in zip(budgets, slots_of(budgets, held))]
    places = native.nearfar.Places(seen, counts, merged, slots_of(budgets, held), grown)
    root = kernel.logit_scale(D, scale) ** 0.5
    before = native.nearfar.Held(state.sink, state.near, state.slots, state.bias, state.moments, state.queries)
    try:
        out, after, steps = native.nearfar.walk(kernel, root, query, key, value, mask, before, places, attend, spare)
    except NotFiniteError:
        shown = {} if query is None else {"query": query}
        finite.refuse(torch.float32, **shown, key=key, value=value)
    block, window = kernel.block, kernel.window
    lasts = [(s + n - 1) // block * block - window for s, n in zip(seen, counts)]
    merged = [max(m, last) if n else m for m, last, n in zip(merged, lasts, counts)]
    tokens = [s + n for s, n in zip(seen, counts)]
    state = replace(state, **after._asdict(), tokens=torch.tensor(tokens), merged=torch.tensor(merged))
    state.steps = steps
    return out, state


def _grown(kernel: NearFar, size: int, have: int, seen: list[int], counts: list[int], merged: list[int]) -> int:
    """How many slots a head has after the tokens: a block more for each that leaves the window, up to its budget."""
    block, window = kernel.block, kernel.window
    starts = [s // block * block for s in seen]
    while have < size:
        fresh = [
            start - window > max(kernel.sinks, m) and start < s + n
            for start, s, n, m in zip(starts, seen, counts, merged)
        ]
        if any(fresh):
            have = have + block if have + block <= size else size
        elif all(start >= s + n for start, s, n in zip(starts, seen, counts)):
            break
        starts = [start + block for start in starts]
    return have


def causal(
    kernel: NearFar,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: NearFarState,
    *,
    scale: float | None,
    key_mask: Tensor | None,
    attend: bool,
) -> tuple[Tensor | None, NearFarState]:
    """Queries (B, Hq, L, D) at the last of the keys (B, H, S, .), L <= S."""
    mask, before = key_mask, key.shape[2] - query.shape[2]
    if before > 0:
        early = None if mask is None else mask[:, :before]
        _, state = walk(kernel, scale, None, key[:, :, :before], value[:, :, :before], early, state, False)
        key, value, mask = key[:, :, before:], value[:, :, before:], None if mask is None else mask[:, before:]
    return walk(kernel, scale, query, key, value, mask, state, attend)


def absorb(
    kernel: NearFar,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: NearFarState,
    *,
    scale: float | None,
    key_mask: Tensor | None,
) -> NearFarState:
    """Takes keys in for queries that are not at their places; those only say what the keys will be asked for."""
    B, heads, L, D = query.shape
    H = key.shape[1]
    x = query.detach().float() * kernel.logit_scale(D, scale) ** 0.5
    x = torch.nn.functional.pad(x.reshape(B, H, heads // max(1, H) * L, D), (0, 1), value=1.0)
    state = replace(state, moments=state.moments + x.mT @ x)
    return walk(kernel, scale, None, key, value, key_mask, state, False)[1]


def merge(
    entries: Tensor, bias: Tensor, size: int, anchor: Tensor, metric: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`slots.merge`, pair by pair without a table of all costs."""
    return native.nearfar.merge(entries, bias, size, anchor, metric, alpha)


def empty(kernel: NearFar, signature: str, query: Tensor, key: Tensor, value: Tensor) -> NearFarState:
    """The state before the first token."""
    B, heads, _, D = query.shape
    H, none = key.shape[1], torch.zeros(B, dtype=torch.int64)
    like = torch.empty(B, dtype=torch.float32)
    memory = Memory.empty(like, H, heads // max(1, H), D, value.shape[-1], kernel.sinks, kernel.block // kernel.stride)
    return NearFarState.join(signature, [memory], [(0, list(range(H)))], none, none)


def step(
    engine: str, query: Tensor, key: Tensor, value: Tensor, kernel: NearFar, scale: float | None, state: Any, gqa: bool
) -> tuple[Tensor, NearFarState] | None:
    """A plain one-token call, or None: then the long way serves it, or says what is wrong."""
    if engine not in ("auto", "native") or not native.available() or not isinstance(state, NearFarState):
        return None
    if not (isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    tokens, steps = (query, key, value), state.steps
    about = kernel, scale, gqa, *((x.shape, x.dtype) for x in tokens)
    known = steps is not None and steps.about == about and ordinary(*tokens)
    if not known and not _plain(query, key, value, kernel, scale, state, gqa):
        return None
    near, block = state.near, kernel.block
    kept = min(near.shape[2], kernel.window + block - 1)
    end = near.storage_offset() // near.shape[3] + near.shape[2]
    seen = [s + end - steps.first for s in steps.seen] if known else state.tokens.tolist()
    phases = [s % block for s in seen]
    if min(seen) < kernel.sinks or min(phases) == 0:
        out, entered = walk(kernel, scale, query, key, value, None, state, True, spare=block)
        assert out is not None
        return out.to(query.dtype), entered
    if known or (steps is not None and not steps.about):
        if not steps.take(end):
            known, steps = False, None
    else:
        steps = None
    if steps is None:
        buffer, end = near.new_empty(*near.shape[:2], kept + block, near.shape[3]), kept
        buffer[:, :, :kept] = near[:, :, near.shape[2] - kept :]
        steps = native.nearfar.Steps(buffer, kept)
        steps.take(end)
    if not known:
        slots = slots_of(kernel.budgets(key.shape[1]), state.slots.shape[1])
        places = native.nearfar.Places(seen, [1] * len(seen), state.merged.tolist(), slots, slots)
        held = native.nearfar.Held(state.sink, near, state.slots, state.bias, state.moments, state.queries)
        steps.prepare(about, kernel, kernel.logit_scale(query.shape[-1], scale) ** 0.5, tokens, held, places)
    ends = max(phases) == block - 1
    sampled = ends or min(p % kernel.stride for p in phases) == 0
    queries = torch.empty_like(state.queries) if sampled else None
    moments = torch.empty_like(state.moments) if ends else None
    try:
        out = steps.run(end - kept, end, tokens, (state.queries, queries, moments))
    except NotFiniteError:
        finite.refuse(torch.float32, query=query, key=key, value=value)
    new = NearFarState(
        state.kernel,
        state.sink,
        steps.buffer.narrow(2, end - kept, kept + 1),
        state.slots,
        state.bias,
        state.moments if moments is None else moments,
        state.queries if queries is None else queries,
        state.tokens + 1,
        state.merged,
    )
    new.steps = steps
    return out if query.dtype is torch.float32 else out.to(query.dtype), new


def _plain(
    query: Tensor, key: Tensor, value: Tensor, kernel: NearFar, scale: float | None, state: NearFarState, gqa: bool
) -> bool:
    """Whether tensors and state fit together as they must, and nothing else is wanted of them."""
    if not ordinary(query, key, value):
        return False
    if not (query.dim() == key.dim() == value.dim() == 4 and state.near.dim() == 4):
        return False
    B, heads, L, D = query.shape
    H, M = key.shape[1], value.shape[3]
    if L != 1 or key.shape != (B, H, 1, D) or value.shape != (B, H, 1, M) or B == 0 or H == 0 or M == 0:
        return False
    groups, left = divmod(heads, H)
    if left or (groups != 1 and not gqa) or state.queries.shape[:3] != (B, H, groups):
        return False
    if state.queries.shape[-1] != D + 1 or state.near.shape[:2] != (B, H) or state.near.shape[3] != D + M:
        return False
    if not query.dtype == key.dtype == value.dtype or state.kernel != kernel.signature(scale):
        return False
    if scale is not None and not scale > 0:
        return False
    if native.refusal(kernel, query, key, value) or key.device.type != "cpu" or value.device.type != "cpu":
        return False
    contiguous = state.queries.is_contiguous() and state.moments.is_contiguous()
    return contiguous and refusal(kernel, query, key, value, state) is None
