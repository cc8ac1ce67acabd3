"""linattn.selective_scan: the scan of Mamba-1."""

import math
from collections.abc import Callable
from typing import Literal, overload

from torch import Tensor

from ..engines import EngineName
from ..engines.native import selective_scan as native
from ..engines.plan import rule_refusal, serves_natively
from ..kernels.base import compute_dtype
from ..ops.selective_scan import chunk
from ..ops.selective_scan.call import SelectiveScanCall
from ..states import ScanState, State
from . import routing
from .scan_checks import check_device, check_shape, check_tensor, check_tokens, read_state


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    state: State | None = None,
    return_state: Literal[False] = False,
    engine: EngineName = "auto",
) -> Tensor: ...


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    state: State | None = None,
    return_state: Literal[True],
    engine: EngineName = "auto",
) -> tuple[Tensor, ScanState]: ...


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    state: State | None = None,
    return_state: bool,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, ScanState]: ...


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    state: State | None = None,
    return_state: bool = False,
    engine: EngineName = "auto",
) -> Tensor | tuple[Tensor, ScanState]:
    """The selective scan of Mamba-1, with the layout and meaning of mamba_ssm's selective_scan_fn.

    For each channel a state h of n numbers decays and is written to by every token:

        dt = softplus(delta + delta_bias);    h <- exp(dt A) h + dt B u;    out = (C . h + D u) silu(z)

    >>> import torch, linattn
    >>> u, delta, z = (torch.randn(2, 32, 100) for _ in range(3))
    >>> A = -torch.rand(32, 16)
    >>> B, C = torch.randn(2, 16, 100), torch.randn(2, 16, 100)
    >>> linattn.selective_scan(u, delta, A, B, C, z=z, delta_softplus=True).shape
    torch.Size([2, 32, 100])

    One long call equals many short ones:

    >>> whole = linattn.selective_scan(u, delta, A, B, C, delta_softplus=True)
    >>> first, state = linattn.selective_scan(u[..., :60], delta[..., :60], A, B[..., :60], C[..., :60],
    ...                                       delta_softplus=True, return_state=True)
    >>> rest = linattn.selective_scan(u[..., 60:], delta[..., 60:], A, B[..., 60:], C[..., 60:],
    ...                               delta_softplus=True, state=state)
    >>> torch.allclose(torch.cat([first, rest], -1), whole, atol=1e-5)
    True

    Args:
        u: inputs (..., channels, tokens). A transposed view of (..., tokens, channels) is not copied.
        delta: step sizes, of u's shape.
        A: decay rates (channels, n), negative for a decaying state.
        B, C: (..., n, tokens), or (..., groups, n, tokens): one B and C for each group of adjacent channels.
        D: (channels), the weight of u itself in the output.
        z: output gate, of u's shape.
        delta_bias: (channels), added to delta.
        delta_softplus: take the softplus of delta (+ delta_bias).
        state: the state of an earlier call, to continue from.
        return_state: also return the state.
        engine: "auto", "torch" or "native".

    Returns:
        (..., channels, tokens) of u's dtype; with return_state, that and a ScanState. Everything is computed in float32, or
        in float64 if u is float64.
    """
    if (router := routing.current()) is not None:
        given = SelectiveScanCall(u, delta, A, B, C, D, z, delta_bias, delta_softplus=delta_softplus)._asdict()
        given |= {"state": state, "return_state": return_state, "engine": engine}
        scan: Callable[..., Tensor | tuple[Tensor, ScanState]] = router.function("selective_scan")
        return scan(**given)
    u = check_tokens("u", u)
    *batch, channels, tokens = u.shape
    flat = u.dim() != 3
    b = math.prod(batch)
    delta, z = _like_u("delta", delta, u), None if z is None else _like_u("z", z, u)
    A = check_tensor("A", A, "(channels, n)")
    if A.dim() != 2 or A.shape[0] != channels or A.shape[1] == 0:
        raise ValueError(
            f"A must be (channels, n) with {channels} channels, as u {tuple(u.shape)}; got {tuple(A.shape)}."
        )
    B, C = _mixing("B", B, u, A), _mixing("C", C, u, A)
    if B.shape != C.shape:
        raise ValueError(f"B and C must have the same groups, got {tuple(B.shape)} and {tuple(C.shape)}.")
    D, delta_bias = (_per_channel(name, x, channels) for name, x in (("D", D), ("delta_bias", delta_bias)))
    h = None
    if state is not None:
        shape = (*batch, channels, A.shape[1])
        h = read_state(state, ScanState, "h", "selective_scan", "(batch, channels, n)", shape)
    check_device({"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias, "state": h})
    if flat:
        u, delta = u.reshape(b, channels, tokens), delta.reshape(b, channels, tokens)
        z = None if z is None else z.reshape(b, channels, tokens)
        h = None if h is None else h.reshape(b, channels, A.shape[1])
    out, last = _run(engine, SelectiveScanCall(u, delta, A, B, C, D, z, delta_bias, h, delta_softplus))
    if flat:
        out, last = out.reshape(*batch, channels, tokens), last.reshape(*batch, channels, A.shape[1])
    return (out, ScanState("selective_scan", last)) if return_state else out


def _run(engine: str, call: SelectiveScanCall) -> tuple[Tensor, Tensor]:
    """By one of the engines."""
    if serves_natively(engine, rule_refusal(*call[:9])) and call.u.numel():
        return native.selective_scan(call)
    out, last = chunk.selective_scan(call.to(compute_dtype(call.u.dtype)))
    return out.to(call.u.dtype), last


def _like_u(name: str, x: object, u: Tensor) -> Tensor:
    found = check_tensor(name, x, "(..., channels, tokens)")
    check_shape(name, found, "of the shape of u", tuple(u.shape))
    return found


def _mixing(name: str, x: object, u: Tensor, A: Tensor) -> Tensor:
    """B or C as (b, groups, n, tokens)."""
    found = check_tensor(name, x, "(..., n, tokens) or (..., groups, n, tokens)")
    *batch, channels, tokens = u.shape
    lead = found.dim() - len(batch) - 2
    groups = found.shape[len(batch)] if lead == 1 else 1
    expected = (*batch, *((groups,) if lead == 1 else ()), A.shape[1], tokens)
    if tuple(found.shape) != expected:
        raise ValueError(
            f"{name} must be (..., n, tokens) = {(*batch, A.shape[1], tokens)}, or have a dimension of groups before n, "
            f"beside u {tuple(u.shape)} and A {tuple(A.shape)}; got {tuple(found.shape)}."
        )
    if groups == 0 or channels % groups:
        raise ValueError(f"the groups of {name} must divide the {channels} channels, got {groups} groups.")
    return found.reshape(math.prod(batch), groups, A.shape[1], tokens)


def _per_channel(name: str, x: object, channels: int) -> Tensor | None:
    if x is None:
        return None
    found = check_tensor(name, x, "(channels)")
    check_shape(name, found, "(channels)", (channels,))
    return found
