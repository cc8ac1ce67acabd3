"""Decode fast path: one token from a state, without gradients, with little Python around the native step."""

import math
from types import ModuleType

import torch
from torch import Tensor

from ..engines.native.ffi import library
from ..engines.native.plans import eligible
from ..states.recurrent import RecurrentState
from .recurrent_checks import LOWEST


def decode(
    rule: str,
    native: ModuleType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: tuple[Tensor | None, ...],
    state: object,
    enable_gqa: bool,
    **options: float | bool,
) -> tuple[Tensor, RecurrentState] | None:
    """rows and the new state, or None: then the call is not eligible, and the general path serves it or says what is wrong.

    gates: beta (B, H, 1) of the delta rule, and log_decay None, (B, H, 1) or (B, H, 1, D).
    """
    if not isinstance(state, RecurrentState) or state.kernel != rule or not isinstance(query, Tensor):
        return None
    if query.dim() != 4 or query.shape[2] != 1 or torch.compiler.is_compiling() or library.why_not is not None:
        return None
    S, log_decay = state.S, gates[-1]
    if not all(isinstance(x, Tensor) for x in (key, value, S, *gates[:-1])):
        return None
    given = [query, key, value, S, *(x for x in gates if x is not None)]
    if not eligible(*given) or not _fits(query, key, value, S, gates, enable_gqa):
        return None
    if log_decay is not None:
        low, high = log_decay.aminmax()
        if not (float(high) <= 0 and float(low) >= LOWEST):
            return None
    out, final = native.decode(query, key, value, *gates, None, S, **options)
    if not math.isfinite(out.sum()):
        return None
    return out, RecurrentState(rule, final, state.tokens + 1)


def _fits(
    query: Tensor, key: Tensor, value: Tensor, S: Tensor, gates: tuple[Tensor | None, ...], enable_gqa: bool
) -> bool:
    """Shapes are canonical as they are, and dtypes what the native step takes."""
    B, Hq, _, D = query.shape
    if value.dim() != 4 or key.dim() != 4:
        return False
    H, M, Hk = value.shape[1], value.shape[3], key.shape[1]
    if key.shape != (B, Hk, 1, D) or value.shape != (B, H, 1, M) or S.shape != (B, H, D, M) or not B * H * D * M:
        return False
    if not Hq == Hk == H and (not enable_gqa or not Hq * Hk or H % Hk or (H % Hq and Hq % H)):
        return False
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False
    shapes = (B, H, 1), (B, H, 1, D)
    fine = all(x is None or (x.dtype == torch.float32 and x.shape in shapes) for x in gates)
    return fine and S.dtype == torch.float32 and (len(gates) == 1 or gates[0] is None or gates[0].dim() == 3)
