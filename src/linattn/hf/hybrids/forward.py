"""One layer's forward with other functions: what its modelling file calls by name is looked up in a table of ours first."""

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from . import conv, delta, scan, ssd
from .packing import packed_bounds


def _no_fused_form(*_: object, **__: object) -> None:
    """For functions that compute a whole layer at once: None makes the layer go on step by step."""
    return None


# What transformers' modelling files call their functions, and what serves them here.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta.delta_rule,
    "torch_recurrent_gated_delta_rule": delta.delta_rule,
    "chunk_kimi_delta_attention": delta.delta_rule,
    "recurrent_kimi_delta_attention": delta.delta_rule,
    "mamba2_chunk_scan": ssd.chunk_scan,
    "mamba2_selective_state_update": scan.selective_state_update,
    "mamba_selective_scan": scan.selective_scan_fn,
    "mamba_selective_state_update": scan.selective_state_update,
    "causal_conv1d_fn": conv.causal_conv1d_fn,
    "causal_conv1d_update": conv.causal_conv1d_update,
    "mamba_inner_fn": _no_fused_form,
    "mamba2_split_conv1d_scan_combined": _no_fused_form,
}


def functions_called(kind: type[nn.Module]) -> set[str]:
    """The names in FUNCTIONS that the forward of a class of modules calls."""
    return _names(kind.forward) & set(FUNCTIONS)


def _names(function: Any) -> set[str]:
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        return _names(inner)
    return set(getattr(getattr(function, "__code__", None), "co_names", ()))


def rebuild(function: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
    """The same function, which finds the names of `table` there instead of in its module; decorators are kept."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        # Without __name__, torch.compile reads this dictionary; with it, it would read the module's own.
        scope = {name: x for name, x in function.__globals__.items() if name != "__name__"} | dict(table)
        cells = function.__closure__
    else:
        scope, new = function.__globals__, rebuild(inner, table)
        cells = tuple(types.CellType(new) if c.cell_contents is inner else c for c in function.__closure__ or ())
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_forwards: dict[type[nn.Module], Any] = {}  # made once for each class


class EngineForward:
    """Stands in for `forward` on one module; the class, and so every other model, keeps its own."""

    def __init__(self, module: nn.Module):
        self.__setstate__({"module": module})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module: Any = state["module"]
        kind = type(self.module)
        if kind not in _forwards:  # before torch.compile looks on, which could not follow
            _forwards[kind] = rebuild(kind.forward, FUNCTIONS)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = type(self.module)
        if not hidden_states.is_cpu:
            return kind.forward(self.module, hidden_states, *args, **kwargs)
        return _forwards[kind](self.module, hidden_states, *args, **kwargs)


class ScanForward(EngineForward):
    """For Mamba-1, whose scan is told neither the state that the cache holds nor where packed sequences begin.

    Without them, a prompt read in several calls would forget what came before.
    """

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {}
        tokens = hidden_states.shape[1]
        cache = kwargs.get("cache_params", args[0] if args else None)
        if cache is not None and tokens > 1:
            state = cache.get_recurrent_state(self.module.layer_idx, state_idx=0)
            options = {} if state is None else {"state": state}
        if kwargs.get("seq_idx") is not None or kwargs.get("cu_seq_lens_q") is not None:
            options["bounds"] = packed_bounds(kwargs.get("seq_idx"), kwargs.get("cu_seq_lens_q"), tokens)
        if not options or not hidden_states.is_cpu:
            return super().__call__(hidden_states, *args, **kwargs)
        table = {**FUNCTIONS, "mamba_selective_scan": _scan_from(**options)}
        return rebuild(type(self.module).forward, table)(self.module, hidden_states, *args, **kwargs)


def _scan_from(state: Tensor | None = None, bounds: list[int] | None = None) -> Callable[..., Any]:
    """selective_scan_fn from a state (batch, channels, n), or (batch, heads, channels, n) with a call for each head (Zamba)."""
    states = iter(() if state is None else [state] if state.dim() == 3 else state.unbind(1))

    def scan_from(*args: Any, **kwargs: Any) -> Any:
        kwargs |= {"initial_state": next(states, None), "bounds": bounds}
        return scan.selective_scan_fn(*args, **kwargs)

    return scan_from
