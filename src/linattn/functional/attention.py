"""linattn.attention: the public entry point for every kernel, form and engine."""

from typing import Literal, overload

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..engines.call import EngineName
from ..engines.native import available
from ..engines.native.ffi import library
from ..kernels import Kernel, KernelName, Softmax
from ..kernels.names import CONSTANTS, constant
from ..nearfar import NearFar, native_fast_path
from ..ops.packing import CuSeqlens
from ..states import LinearState, State
from ..states.recurrent import RecurrentState
from . import checks, decayed_attention, routing
from .normalise import Arguments, normalise, restore
from .run import run

if available():
    from ..engines.native import decode, plans


@overload
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
    return_state: Literal[False] = False,
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> Tensor: ...


@overload
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
    return_state: Literal[True],
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> tuple[Tensor, State]: ...


@overload
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
    return_state: bool,
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, State]: ...


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
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, State]:
    """Attention with the arguments of torch's scaled_dot_product_attention and a kernel whose cost is linear in the tokens.

    >>> import torch, linattn
    >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
    >>> linattn.attention(q, k, v, kernel="positive", is_causal=True).shape
    torch.Size([1, 8, 1000, 64])

    One long call equals many short ones:

    >>> first, state = linattn.attention(q[:, :, :600], k[:, :, :600], v[:, :, :600],
    ...                                  kernel="elu", is_causal=True, return_state=True)
    >>> rest = linattn.attention(q[:, :, 600:], k[:, :, 600:], v[:, :, 600:], kernel="elu", is_causal=True, state=state)
    >>> whole = linattn.attention(q, k, v, kernel="elu", is_causal=True)
    >>> torch.allclose(torch.cat([first, rest], 2), whole, atol=1e-5)
    True

    Args:
        query: (..., heads, L, dim), or (L, dim).
        key, value: (..., kv heads, S, dim) and (..., kv heads, S, value dim).
        attn_mask: None, or a bool mask (..., 1, S) that only hides keys, True = attend. Other masks have no linear form.
        dropout_p: must be 0.0: the attention weights are never formed, so they cannot be dropped.
        is_causal: query i sees the keys up to its own; with L != S the last query is aligned with the last key.
        kernel: a Kernel, or the name of a default one: "softmax" (exact, O(N^2), torch's own), "nearfar" (softmax
            approximated with a bounded state), "positive", "trig", "polynomial", "taylor", "elu", "relu", "identity".
        scale: multiplies q.k. None: 1/sqrt(dim) for kernels that approximate softmax, 1 for the others.
        key_mask: (batch, S) bool, True = attend. Masked tokens are ignored entirely. A query that sees no key gets 0.
        enable_gqa: allow grouped query heads: their number is a multiple of the kv heads.
        normalize: False returns the numerator without the division, as in retention, lightning attention, GLA and Mamba-2.
        log_decay: (batch, kv heads, S) or, for each feature of the keys, (batch, kv heads, S, features); not above 0. Its
            exponential multiplies the sums before each token is added. Causal only.
        gate: (batch, kv heads, S) in (0, 1], as in RFA-GATE: multiplies the sums, and weights the token by 1 - gate.
            Causal only.
        cu_seqlens: bounds 0 = c_0 <= c_1 .. <= c_n of n sequences packed along the tokens, or a pair of them for
            queries and keys. States then have a batch dimension of n after the others.
        state: the state of an earlier call, to continue from.
        return_state: also return the state.
        donate_state: the new state may take the memory of `state`, which must not be used afterwards. Saves time for one
            token of decayed sums; elsewhere nothing changes.
        engine: "auto", "torch" or "native".

    Returns:
        (..., heads, L, value dim) of query's dtype; with return_state, that and a State.
    """
    if routing.open_contexts and (router := routing.current()) is not None:
        served: Tensor | tuple[Tensor, State] = router.function("attention")(
            *(query, key, value, attn_mask, dropout_p, is_causal),
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
        return served
    if scale is not None:
        checks.check_scale(scale)
    unmasked = key_mask is None and cu_seqlens is None and attn_mask is None and not dropout_p
    native = engine in ("auto", "native") and library.why_not is None
    if unmasked and native and normalize and log_decay is None and gate is None and isinstance(query, Tensor):
        fast = _fast_path(query, key, value, kernel, scale, is_causal, enable_gqa, state, return_state)
        if fast is not None:
            return fast
    if type(state) is RecurrentState and unmasked and native and is_causal and return_state and gate is None:
        quick = decayed_attention.decode(
            query, key, value, kernel, scale, enable_gqa, normalize, log_decay, state, donate_state
        )
        if quick is not None:
            return quick
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
    if decayed_attention.serves(arguments):
        return decayed_attention.attend(arguments)
    call, tokens, layout = normalise(arguments)
    out, new_state = run(call, *tokens)
    return restore(out, new_state, state, layout)


def _fast_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | KernelName,
    scale: float | None,
    is_causal: bool,
    enable_gqa: bool,
    state: State | None,
    return_state: bool,
) -> Tensor | tuple[Tensor, State] | None:
    """Calls without masks or gates that the native engine serves with little Python; None if the call is not eligible."""
    if query.dim() != 4 or isinstance(query, FakeTensor):  # whose sizes may be symbols, which cannot be looked up
        return None
    made = kernel if isinstance(kernel, Kernel) else CONSTANTS.get((kernel, query.shape[-1], query.device))
    if made is None:
        made = constant(kernel, query)
    if isinstance(made, NearFar):
        if is_causal:
            return native_fast_path.causal(query, key, value, made, scale, enable_gqa, state, return_state)
        stateless = state is None and not return_state
        return native_fast_path.bidirectional(query, key, value, made, scale, enable_gqa) if stateless else None
    if isinstance(made, Softmax):
        return None
    if state is None and not return_state:
        return plans.prefill(made, query, key, value, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)
    if not is_causal or not (state is None or isinstance(state, LinearState)):
        return None
    if state is not None and return_state and query.shape[-2] == 1:
        return decode.decode(made, query, key, value, state, scale=scale, enable_gqa=enable_gqa)
    served = plans.prefill_with_state(made, query, key, value, state, scale=scale, enable_gqa=enable_gqa)
    return served if served is None or return_state else served[0]
