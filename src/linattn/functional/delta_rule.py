"""linattn.delta_rule: DeltaNet, the gated delta rule and Kimi delta attention."""

from typing import Literal, overload

from torch import Tensor

from ..engines.native import delta_rule as native
from ..ops.delta_rule import chunk
from ..ops.packing import CuSeqlens
from ..states.base import State
from . import routing
from .checks import check_scale, check_tokens
from .recurrent import EngineName, RuleArguments, choose, read_call
from .recurrent_fast_path import decode, prefill


@overload
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
    return_state: Literal[False] = False,
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> Tensor: ...


@overload
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
    return_state: Literal[True],
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> tuple[Tensor, State]: ...


@overload
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
    return_state: bool,
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, State]: ...


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
    donate_state: bool = False,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, State]:
    """The delta rule: causal attention with a self-correcting state, in time linear in the tokens.

    S <- exp(log_decay_t) S;  S <- S + beta_t k_t (v_t - k_t^T S)^T;  out_t = scale q_t^T S.

    >>> import torch, linattn
    >>> q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))
    >>> beta, log_decay = torch.rand(1, 8, 1000), -torch.rand(1, 8, 1000)
    >>> linattn.delta_rule(q, k, v, beta=beta, log_decay=log_decay, normalize_qk=True).shape
    torch.Size([1, 8, 1000, 64])

    One long call equals many short ones:

    >>> options = {"normalize_qk": True, "return_state": True}
    >>> first, state = linattn.delta_rule(q[:, :, :600], k[:, :, :600], v[:, :, :600], beta=beta[..., :600], **options)
    >>> rest, _ = linattn.delta_rule(q[:, :, 600:], k[:, :, 600:], v[:, :, 600:], beta=beta[..., 600:], state=state, **options)
    >>> whole = linattn.delta_rule(q, k, v, beta=beta, normalize_qk=True)
    >>> torch.allclose(torch.cat([first, rest], 2), whole, atol=1e-4)
    True

    Args:
        query, key: (..., heads, T, dim), or (T, dim).
        value: (..., value heads, T, value dim), or (T, value dim).
        beta: (..., value heads, T): how far the value stored for a key moves to the new one. 1 replaces it; up to 2,
            the state has negative eigenvalues and can track parity. For tokens without heads (T,).
        log_decay: None (DeltaNet), (..., value heads, T) (gated delta rule) or (..., value heads, T, dim) (KDA), not
            above 0. For tokens without heads (T,) or (T, dim).
        scale: multiplies the output. None is 1/sqrt(dim).
        normalize_qk: divides q and k by sqrt(sum of squares + 1e-6). Without it, keys with beta |k|^2 > 2 diverge.
        key_mask: (batch, T) bool, True = use the token. A masked token neither writes nor decays.
        enable_gqa: value heads are a multiple of key heads, and query heads divide them or are a multiple of them.
        cu_seqlens: bounds 0 = c_0 <= c_1 .. <= c_n of n sequences packed along the tokens. States then have a batch
            dimension of n after the others.
        state: the state of an earlier call, to continue from.
        return_state: also return the state.
        donate_state: the new state may take the memory of `state`, which must not be used afterwards: a token then costs
            little more than reading and writing its state once.
        engine: "auto", "torch" or "native".

    Returns:
        (..., heads, T, value dim) of query's dtype, with the larger of query heads and value heads; with return_state,
        that and a State.
    """
    if scale is not None:
        check_scale(scale)
    if not isinstance(beta, Tensor):
        raise TypeError(
            f"beta must be a floating-point tensor (..., value heads, tokens), got {type(beta).__name__}: "
            "torch.ones(..) replaces what is stored for a key."
        )
    if not isinstance(query, Tensor) or query.dim() < 2 or query.shape[-1] == 0:
        check_tokens(query, key, value)  # says what is wrong
    router = routing.current() if routing.open_contexts else None
    tokens = query, key, value, beta, log_decay
    if key_mask is None and cu_seqlens is None and engine in ("auto", "native") and router is None:
        options = scale, normalize_qk, enable_gqa
        if state is not None and query.shape[-2] == 1:
            quick = decode("delta_rule", tokens, options, state, donate_state and return_state)
        else:
            quick = prefill(tokens, options, state)
        if quick is not None:
            return quick if return_state else quick[0]
    arguments = RuleArguments(
        *tokens, scale, normalize_qk, key_mask, enable_gqa, cu_seqlens, state, return_state, engine
    )
    if router is not None:
        served: Tensor | tuple[Tensor, State] = router.function("delta_rule")(**arguments._asdict())
        return served
    call = read_call("delta_rule", arguments)
    out, final = call.run(native.delta_rule if choose(engine, call) else chunk.delta_rule)
    return (call.rows(out), call.state_after(final)) if return_state else call.rows(out)
