"""Argument checks: errors quote what was given and say what to do."""

import math

import torch
from torch import Tensor

from ..kernels import Softmax
from ..kernels.base import Kernel, compute_dtype, is_plain
from ..nearfar.kernel import NearFar
from ..nearfar.state import NearFarState
from ..nearfar.validate import cast_recall, check_kernel
from ..states import KeyValueCache, LinearState, State, finite


def check_inputs(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The batch dimensions of the call."""
    check_tokens(query, key, value)
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"every key needs a value, got {key.shape[-2]} keys and {value.shape[-2]} values in {_shapes(query, key, value)}."
        )
    if query.dim() == 2:
        return ()
    _check_heads(query, key, value, enable_gqa)
    batches = query.shape[:-3], key.shape[:-3], value.shape[:-3]
    if batches[0] == batches[1] == batches[2]:
        return tuple(batches[0])
    try:
        return tuple(torch.broadcast_shapes(*batches))
    except RuntimeError:
        raise ValueError(
            f"the batch dimensions of query, key and value do not fit together: {_shapes(query, key, value)}."
        ) from None


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}.")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name} must be an ordinary dense tensor, got layout {x.layout}: convert with to_dense().")
    if x.dim() < 2:
        raise ValueError(f"{name} must be (..., heads, tokens, dim) or (tokens, dim), got shape {tuple(x.shape)}.")


def check_tokens(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Dense floating-point tensors of one dtype, on one device, with dims that fit together."""
    for name, x in {"query": query, "key": key, "value": value}.items():
        _check_tensor(name, x)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}: "
            "cast them first, e.g. key.to(query.dtype)."
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}."
        )
    if not query.dim() == key.dim() == value.dim():
        raise ValueError(
            f"query, key and value must have the same number of dimensions, got {_shapes(query, key, value)}."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same dim, got {query.shape[-1]} and {key.shape[-1]} in {_shapes(query, key, value)}."
        )
    if query.shape[-1] == 0 or value.shape[-1] == 0:
        raise ValueError(f"query, key and value must have at least one coordinate, got {_shapes(query, key, value)}.")


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads == 0 or kv_heads == 0:
        raise ValueError(f"query and key must have at least one head, got {_shapes(query, key, value)}.")
    if kv_heads != value.shape[-3]:
        raise ValueError(
            f"key and value must have the same heads, got {kv_heads} and {value.shape[-3]} in {_shapes(query, key, value)}."
        )
    if heads == kv_heads:
        return
    if heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key heads, got {heads} and {kv_heads}: {heads} query heads can share "
            f"any number of key heads that divides {heads}."
        )
    if not enable_gqa:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}: pass enable_gqa=True to let groups of query heads share "
            "keys and values."
        )


def check_mask(key_mask: Tensor, batch: tuple[int, ...], tokens: int) -> None:
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        kind = key_mask.dtype if isinstance(key_mask, Tensor) else type(key_mask).__name__
        raise TypeError(f"key_mask must be a bool tensor, True = attend, got {kind}: convert with key_mask.bool().")
    try:
        fits = torch.broadcast_shapes(key_mask.shape, (*batch, tokens)) == (*batch, tokens)
    except RuntimeError:
        fits = False
    if not fits or key_mask.dim() < 1 or key_mask.shape[-1] != tokens:
        raise ValueError(
            f"key_mask must be (batch, key tokens) = {(*batch, tokens)}, got {tuple(key_mask.shape)}: "
            "it says which keys may be seen, by every head and every query."
        )


def check_device(name: str, x: Tensor, query: Tensor) -> None:
    """A mask or gate must be where the tokens are: engines read its memory."""
    if x.device != query.device:
        raise ValueError(f"{name} is on {x.device}, query is on {query.device}: move it with {name}.to(query.device).")


def check_attn_mask(attn_mask: Tensor, batch: tuple[int, ...], has_heads: bool, tokens: int) -> Tensor:
    """The key_mask (..., S) that a mask of padding (..., 1, 1, S) is; any other mask is refused."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}.")
    shape = (*batch, *(1,) * has_heads, 1, tokens)
    given = tuple(attn_mask.shape)
    padded = (1,) * (len(shape) - len(given)) + given
    fits = len(padded) == len(shape) and all(got in (1, want) for got, want in zip(padded, shape, strict=True))
    if attn_mask.dtype != torch.bool or not fits or padded[-1] != tokens:
        raise ValueError(
            f"attn_mask may only hide keys from every query and head, as a bool tensor of {shape}; got {attn_mask.dtype} of "
            f"{given}. Any other mask has no linear form: every query would need sums of its own. Use is_causal=True, "
            "key_mask= for padding or cu_seqlens= for packed sequences, or torch's own scaled_dot_product_attention."
        )
    return attn_mask.reshape(*padded[: len(batch)], tokens)


def check_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p={dropout_p} would drop single attention weights, which a linear kernel never forms: "
            "pass 0.0, and put dropout on the output instead."
        )


def check_sums(kernel: Kernel, normalize: bool, decays: bool) -> None:
    """Refuses options that act on sums if the kernel has none."""
    if not isinstance(kernel, (Softmax, NearFar)):
        return
    what = "exact softmax" if isinstance(kernel, Softmax) else "near/far attention"
    if not normalize:
        raise ValueError(
            f"normalize=False leaves out a denominator; {what} is not made of sums. Choose a linear kernel."
        )
    if decays:
        raise ValueError(f"log_decay and gate act on sums; {what} has none. Choose a linear kernel.")


def check_forgetting(name: str, gate: Tensor, is_causal: bool, shape: tuple[int, ...]) -> None:
    """Checks the shape and range of log_decay or gate."""
    if not is_causal:
        raise ValueError(f"{name} forgets with time, so it needs is_causal=True.")
    if not isinstance(gate, Tensor) or not gate.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor of (batch, kv heads, tokens).")
    try:
        fits = torch.broadcast_shapes(gate.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must be (batch, kv heads, key tokens) = {shape}, got {tuple(gate.shape)}.")
    if not is_plain(gate) or not gate.numel():
        return
    if name == "gate" and not bool(((gate > 0) & (gate <= 1)).all()):
        raise ValueError("gate must lie in (0, 1]: 1 keeps everything and lets nothing in.")
    if name == "log_decay" and not bool(((gate <= 0) & (gate > -torch.inf)).all()):
        raise ValueError(
            "log_decay must be finite and not above 0: it is the logarithm of what multiplies the sums, 0 forgets nothing. "
            "To start anew inside a sequence, pass cu_seqlens."
        )


def check_scale(scale: float) -> None:
    if isinstance(scale, (bool, Tensor)) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a positive number or None, got {type(scale).__name__}.")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number or None, got {scale}.")


def check_state(
    state: State,
    kind: type[State],
    signature: str,
    batch: tuple[int, ...],
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> State:
    """The state as the engines take it: validated whole and against the call, in the dtype that the call computes in."""
    if not isinstance(state, State):
        raise TypeError(f"state must be a linattn.State from return_state=True, got {type(state).__name__}.")
    if not isinstance(state, kind) or state.kernel != signature:
        raise ValueError(f"this state was made by {state.kernel}; it cannot go on with {signature}.")
    found, sizes = state.validate()
    if state.device != query.device:
        raise ValueError(
            f"this state is on {state.device}, query, key and value are on {query.device}: move it with state.to(query.device)."
        )
    dtype = compute_dtype(query.dtype)
    needed = *batch, key.shape[-3], value.shape[-1]  # batch, kv heads, value dim
    if isinstance(state, LinearState):
        got, expected = (
            (*found, sizes["H"], sizes["r"], sizes["M"]),
            (*needed[:-1], kernel.features_of(query), needed[-1]),
        )
        if got != expected:
            raise ValueError(
                f"this state has S of shape {got}; the call needs {expected} (batch, kv heads, features, value dim)."
            )
    elif isinstance(state, KeyValueCache):
        if (*found, sizes["H"], sizes["M"]) != needed:
            raise ValueError(
                f"this state has values of shape {tuple(state.value.shape)}; the call has batch {batch}, {needed[-2]} kv "
                f"heads and value dim {needed[-1]}."
            )
        if sizes["D"] != key.shape[-1]:
            raise ValueError(f"this state has keys of dim {sizes['D']}; the call has keys of dim {key.shape[-1]}.")
        dtype = key.dtype
    elif isinstance(state, NearFarState) and isinstance(kernel, NearFar):
        got = (*found, sizes["H"], sizes["E"] - sizes["D1"] + 1)
        if got != needed:
            raise ValueError(f"this state has (batch, kv heads, value dim) {got}; the call has {needed}.")
        check_kernel(state, sizes, kernel, query.shape[-3] // max(1, key.shape[-3]), query.shape[-1])
        state = cast_recall(state, sizes, kernel, dtype)
    return state.cast(dtype)


def check_finite(
    out: Tensor, state: State | None, before: State | None, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """NaN or infinity in the result is an error that names its source. It is looked for in the result, not the input:
    one pass over the rows, and masked keys may hold anything. before: the state that the call went on from."""
    results = [out, *(state.S, state.Z)] if isinstance(state, LinearState) else [out]
    if not is_plain(out) or all(math.isfinite(x.detach().sum()) or bool(torch.isfinite(x).all()) for x in results):
        return
    finite.refuse(out.dtype, query=query, key=key, value=value, **finite.of_state(before))
