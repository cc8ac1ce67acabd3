"""One token at a time, with as little Python around the arithmetic as there can be."""

import ctypes

import torch
from torch import Tensor

from ...kernels.base import Kernel
from ...sums import finite
from ...sums.state import Sums
from .calls import DTYPES, _map_call
from .library import Call, library
from .maps import IDENTITY, native_map


def step(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float | None, state: Sums, enable_gqa: bool
) -> tuple[Tensor, Sums] | None:
    """A plain one-token call that goes on from a state, or None: then the long way serves it, or says what is wrong."""
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or state.S.requires_grad
        or state.Z.requires_grad
    ):
        return None
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return None
    S, Z, level, tokens, guarded = state.S, state.Z, state.log_scale, state.tokens, state.guarded
    fmap = native_map(kernel, scale, query.shape[-1])
    shapes = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, enable_gqa
    known = fmap.steps.get(shapes)
    if known is None:
        known = fmap.steps[shapes] = _prepare(query, key, value, kernel, scale, enable_gqa)
    call, signature, sums_shape, out_shape = known
    plain = S.is_cpu and S.dtype is torch.float32 and S.is_contiguous() and Z.is_contiguous()
    plain = plain and level.is_contiguous() and tokens.is_contiguous() and guarded.is_contiguous()
    if call is None or signature != state.kernel or S.shape != sums_shape or not plain:
        return None
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    call.threads = torch.get_num_threads()
    new = (torch.empty_like(S), torch.empty_like(Z), torch.empty_like(level), torch.empty_like(tokens))
    new_guarded, out = torch.empty_like(guarded), torch.empty(out_shape)
    flags = library.step(
        ctypes.addressof(call),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        S.data_ptr(),
        Z.data_ptr(),
        level.data_ptr(),
        tokens.data_ptr(),
        guarded.data_ptr(),
        new[0].data_ptr(),
        new[1].data_ptr(),
        new[2].data_ptr(),
        new[3].data_ptr(),
        new_guarded.data_ptr(),
        out.data_ptr(),
    )
    if flags:
        finite.refuse(torch.float32, query=query, key=key, value=value)
    return out if query.dtype is torch.float32 else out.to(query.dtype), Sums(state.kernel, *new, new_guarded)


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, scale: float | None, enable_gqa: bool
) -> tuple[Call | None, str, tuple[int, ...], tuple[int, ...]]:
    """What calls of these shapes share; no Call where they cannot come this way."""
    fmap = native_map(kernel, scale, query.shape[-1])
    no = None, "", (), ()
    if any(x.dim() != 4 or x.device.type != "cpu" or x.dtype not in DTYPES for x in (query, key, value)):
        return no
    B, heads, L, D = query.shape
    H, M = key.shape[1], value.shape[3]
    if kernel.dim != D and not kernel.any_dim:
        return no
    if (
        fmap.prepared
        or fmap.kind == IDENTITY
        or L != 1
        or tuple(key.shape) != (B, H, 1, D)
        or tuple(value.shape) != (B, H, 1, M)
        or M == 0
    ):
        return no
    if not query.dtype == key.dtype == value.dtype or B * H == 0 or heads % H or (heads != H and not enable_gqa):
        return no
    call = _map_call(list(fmap.weights), *fmap.numbers())
    call.batch, call.heads, call.kv_heads, call.queries, call.keys, call.dim, call.value_dim = B, heads, H, 1, 1, D, M
    call.dtype = DTYPES[query.dtype]
    call.query_stride[:] = [heads * D, D, D]
    call.key_stride[:] = [H * D, D, D]
    call.value_stride[:] = [H * M, M, M]
    return call, kernel.signature(scale), (B, H, fmap.features, M), (B, heads, 1, M)
