"""linattn.attention: one function for every kernel, every form and every engine."""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import _checks, engines
from .engines import exact
from .kernels import Exact, Kernel, resolve
from .kernels.base import compute_dtype
from .nearfar import NearFar, NearFarState
from .nearfar import attend as nearfar
from .nearfar import native as nearfar_native
from .sums import Cache, State, Sums, oracle
from .sums.gates import log_gates
from .sums.packing import Packing, read_cu_seqlens

CuSeqlens = Tensor | Sequence[int] | tuple[Tensor, Tensor]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel | str = "softmax",
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    state: State | None = None,
    return_state: bool = False,
    engine: str = "auto",
    cu_seqlens: CuSeqlens | None = None,
    decay: Tensor | None = None,
    gate: Tensor | None = None,
    attn_mask: None = None,
) -> Any:
    """Attention in the layout of torch's scaled_dot_product_attention, by a kernel whose cost is linear in the tokens.

    >>> import torch, linattn
    >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
    >>> linattn.attention(q, k, v, kernel="positive", is_causal=True).shape
    torch.Size([1, 8, 1000, 64])

    One long call is the same as many short ones:

    >>> first, state = linattn.attention(q[:, :, :600], k[:, :, :600], v[:, :, :600],
    ...                                  kernel="elu", is_causal=True, return_state=True)
    >>> rest = linattn.attention(q[:, :, 600:], k[:, :, 600:], v[:, :, 600:], kernel="elu", is_causal=True, state=state)
    >>> whole = linattn.attention(q, k, v, kernel="elu", is_causal=True)
    >>> torch.allclose(torch.cat([first, rest], 2), whole, atol=1e-5)
    True

    Args:
        query: (..., heads, L, dim), or (L, dim).
        key, value: (..., kv heads, S, dim) and (..., kv heads, S, value dim).
        kernel: a Kernel, or the name of a default one: "softmax", "exact", "positive", "trig", "polynomial", "taylor",
            "elu", "relu".
        is_causal: query i sees the keys up to its own; with L != S the last query is aligned with the last key.
        scale: multiplies q.k. None is 1/sqrt(dim) for the kernels that stand for softmax and 1 for the others.
        key_mask: (batch, S) bool, True = attend. A row that may see nothing is 0.
        enable_gqa: query heads are a multiple of kv heads, and groups of them share keys and values.
        state: of an earlier call, whose keys come before these.
        return_state: also return the state, to go on from.
        engine: "auto", "torch" or "native".
        cu_seqlens: bounds 0 = c_0 <= c_1 .. <= c_n of sequences packed along the tokens, or a pair of them for
            queries and keys. States then have a batch dimension of n after the others.
        decay: (batch, kv heads, S) in (0, 1], multiplies the sums before each token is added. Causal only.
        gate: the same with the token multiplied by 1 - gate, as in RFA-GATE.
        attn_mask: refused: an arbitrary mask has no linear form.

    Returns:
        (..., heads, L, value dim) of query's dtype; with return_state, that and a State.
    """
    plain = key_mask is None and cu_seqlens is None and decay is None and gate is None and attn_mask is None
    if plain and isinstance(query, Tensor) and query.dim() > 1:
        made = kernel if isinstance(kernel, Kernel) else resolve(kernel, query.shape[-1], query.device)
        quick: Any = None
        if state is None and not return_state and not isinstance(made, (Exact, NearFar)):
            quick = engines.whole(engine, query, key, value, made, scale, is_causal, enable_gqa)
        elif state is not None and return_state and is_causal and query.shape[-2] == 1:
            take: Any = nearfar_native.step if isinstance(made, NearFar) else engines.step
            quick = take(engine, query, key, value, made, scale, state, enable_gqa)
        if quick is not None:
            return quick
    _checks.refuse_attn_mask(attn_mask)
    batch = _checks.check_inputs(query, key, value, enable_gqa)
    _checks.check_scale(scale)
    flat = query.dim() == 2
    if flat:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    entries, heads, S = math.prod(batch), key.shape[-3], key.shape[-2]
    kernel = resolve(kernel, query.shape[-1], query.device)
    kernel.check_dim(query.shape[-1])
    if key_mask is not None:
        _checks.check_mask(key_mask, batch, S)
        key_mask = key_mask.expand(*batch, S).reshape(entries, S)
    if decay is not None and gate is not None:
        raise ValueError("decay and gate are two forms of the same thing: pass one.")
    for name, forget in (("decay", decay), ("gate", gate)):
        if forget is not None:
            _checks.check_gate(name, forget, is_causal, (*batch, heads, S))
    log_decay, log_input = (
        None if x is None else x.expand(*batch, heads, S).reshape(entries, heads, S) for x in log_gates(decay, gate)
    )
    packing = None if cu_seqlens is None else _read_packing(cu_seqlens, query.shape[-2], S)
    state_batch = batch if packing is None else (*batch, packing[0].count)
    signature = kernel.signature(scale)
    if state is not None:
        kind = Cache if isinstance(kernel, Exact) else NearFarState if isinstance(kernel, NearFar) else Sums
        features = kernel.features_of(query) if kind is Sums else None
        _checks.check_state(state, kind, signature, state_batch, heads, features, value.shape[-1])
        state = _flatten_state(state, state_batch)

    dtype = query.dtype
    query, key, value = (_one_batch(x, batch, entries) for x in (query, key, value))
    if packing is not None:
        query_packing, key_packing = packing
        key_valid = key_packing.valid(entries, key.device)
        query, key, value = (
            p.pad(x, token_dim=2) for p, x in ((query_packing, query), (key_packing, key), (key_packing, value))
        )
        key_mask = key_valid if key_mask is None else key_packing.pad(key_mask, token_dim=1) & key_valid
        log_decay, log_input = (None if x is None else key_packing.pad(x, token_dim=2) for x in (log_decay, log_input))
        if log_decay is not None:
            log_decay = log_decay.masked_fill(~key_valid.unsqueeze(1), 0)

    autocast = torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if autocast else nullcontext():
        why_not = nearfar_native.refusal(kernel, query, key, value, state) if isinstance(kernel, NearFar) else None
        chosen = engines.choose(engine, kernel, query, key, value, why_not)
        call = _Call(kernel, scale, signature, key_mask, log_decay, log_input, chosen)
        if isinstance(kernel, Exact):
            out, new_state = call.exact(query, key, value, state, is_causal)
        elif isinstance(kernel, NearFar):
            out, new_state = call.near_far(query, key, value, state, is_causal, return_state)
        else:
            out, new_state = call.linear(query, key, value, state, is_causal)
    if not chosen.CHECKS_FINITE or isinstance(kernel, NearFar):  # torch's softmax serves some calls of either engine
        _checks.check_finite(out, new_state, query, key, value)

    if packing is not None:
        out = packing[0].unpad(out, entries, token_dim=2)
    out = out.to(dtype)
    if len(batch) != 1:
        out = out.reshape(*batch, *out.shape[1:])
    out = out.squeeze(-3) if flat else out
    return (out, _unflatten_state(new_state, state_batch)) if return_state else out


@dataclasses.dataclass
class _Call:
    """A checked call on tensors (B, heads, tokens, dim): which sums are formed, in which order."""

    kernel: Kernel
    scale: float | None
    signature: str
    key_mask: Tensor | None
    log_decay: Tensor | None
    log_input: Tensor | None
    engine: ModuleType

    def exact(self, query: Tensor, key: Tensor, value: Tensor, state: Any, is_causal: bool) -> tuple[Tensor, State]:
        if self.log_decay is not None:
            raise ValueError("decay and gate act on sums; exact softmax has none. Choose a linear kernel.")
        options: Any = {"scale": self.scale, "key_mask": self.key_mask, "signature": self.signature}
        return exact.attend(query, key, value, state, is_causal=is_causal, **options)

    def near_far(
        self, query: Tensor, key: Tensor, value: Tensor, state: Any, is_causal: bool, want_state: bool
    ) -> tuple[Tensor, Any]:
        if self.log_decay is not None:
            raise ValueError("decay and gate act on sums; near/far softmax has none. Choose a linear kernel.")
        options: Any = {"scale": self.scale, "key_mask": self.key_mask, "signature": self.signature}
        options |= {"is_causal": is_causal, "want_state": want_state}
        kernel: Any = self.kernel
        if self.engine is engines.native:
            return nearfar.attend_natively(kernel, query, key, value, state, **options)
        return nearfar.attend(kernel, query, key, value, state, **options)

    def linear(self, query: Tensor, key: Tensor, value: Tensor, state: Any, is_causal: bool) -> tuple[Tensor, State]:
        if state is None:
            features, dtype = self.kernel.features_of(query), compute_dtype(query.dtype)
            shape = (key.shape[0],), key.shape[1], features, value.shape[-1]
            state = Sums.empty(self.signature, *shape, dtype=dtype, device=query.device)
        if not is_causal:
            state = self._absorb(key, value, state, 0, key.shape[-2])
            return self.engine.read(self.kernel, query, state, scale=self.scale)
        # Bottom-right: the last query is aligned with the last key.
        L, S = query.shape[-2], key.shape[-2]
        both = min(L, S)
        state = self._absorb(key, value, state, 0, S - both)
        before = None
        if both < L:
            early, query = query.split([L - both, both], -2)
            before = self.engine.read(self.kernel, early, state, scale=self.scale)
            state = before[1]
        out, state = self.engine.causal(
            self.kernel,
            query,
            key[..., S - both :, :],
            value[..., S - both :, :],
            state,
            scale=self.scale,
            key_mask=_last(self.key_mask, both),
            log_decay=_last(self.log_decay, both),
            log_input=_last(self.log_input, both),
        )
        return (out if before is None else torch.cat([before[0], out], -2)), state

    def _absorb(self, key: Tensor, value: Tensor, state: Sums, start: int, end: int) -> Sums:
        if end <= start:
            return state
        cut = [None if x is None else x[..., start:end] for x in (self.key_mask, self.log_decay, self.log_input)]
        return self.engine.absorb(
            self.kernel,
            key[..., start:end, :],
            value[..., start:end, :],
            state,
            scale=self.scale,
            key_mask=cut[0],
            log_decay=cut[1],
            log_input=cut[2],
        )


def _one_batch(x: Tensor, batch: tuple[int, ...], entries: int) -> Tensor:
    """(entries, heads, tokens, dim)."""
    if len(batch) == 1 and x.shape[0] == entries:
        return x
    return x.expand(*batch, *x.shape[-3:]).reshape(entries, *x.shape[-3:])


def _last(x: Tensor | None, tokens: int) -> Tensor | None:
    return None if x is None else x[..., x.shape[-1] - tokens :]


def _read_packing(cu_seqlens: CuSeqlens, L: int, S: int) -> tuple[Packing, Packing]:
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) and len(cu_seqlens) == 2 else (cu_seqlens, cu_seqlens)
    if any(isinstance(x, int) for x in pair):
        pair = (cu_seqlens, cu_seqlens)
    query_packing, key_packing = read_cu_seqlens(pair[0], L, "query"), read_cu_seqlens(pair[1], S, "key")
    if query_packing.count != key_packing.count:
        raise ValueError(
            f"cu_seqlens give {query_packing.count} query sequences and {key_packing.count} key sequences: "
            "they must be the same sequences."
        )
    return query_packing, key_packing


def _flatten_state(state: State, batch: tuple[int, ...]) -> State:
    return state._replace(lambda _, x: x.reshape(math.prod(batch), *x.shape[len(batch) :]))


def _unflatten_state(state: State, batch: tuple[int, ...]) -> State:
    return state._replace(lambda _, x: x.reshape(*batch, *x.shape[1:]))


def implied_attention(
    query: Tensor,
    key: Tensor,
    kernel: Kernel | str,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    exact_similarity: bool = False,
) -> Tensor:
    """The N x N attention matrix that a kernel implies: what the linear form multiplies V with, without ever forming it.

    >>> import torch, linattn
    >>> q, k = torch.randn(2, 8, 5, 16), torch.randn(2, 8, 5, 16)
    >>> linattn.implied_attention(q, k, "elu", is_causal=True).sum(-1).allclose(torch.ones(2, 8, 5))
    True

    Args:
        query, key: (..., heads, L, dim) and (..., kv heads, S, dim).
        exact_similarity: of the similarity the kernel stands for, instead of its features.
    """
    _checks.check_inputs(query, key, key, True)
    _checks.check_scale(scale)
    if key_mask is not None:
        _checks.check_mask(key_mask, tuple(key.shape[:-3]), key.shape[-2])
    kernel = resolve(kernel, query.shape[-1], query.device)
    if isinstance(kernel, NearFar):
        if not exact_similarity:
            one = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
            options: Any = {"is_causal": is_causal, "scale": scale, "key_mask": key_mask}
            return attention(query, key, one, kernel=kernel, enable_gqa=True, **options)
        kernel = Exact(query.shape[-1])
    return oracle.weights(
        query,
        key,
        kernel,
        is_causal=is_causal,
        scale=scale,
        key_mask=key_mask,
        from_features=not exact_similarity,
    )
