"""linattn: linear-time attention for PyTorch, with a native engine for CPUs."""

TYPE_CHECKING = False  # as typing's, which takes a while to import
if TYPE_CHECKING:  # what type checkers see; at run time each name is imported at its first use
    from . import engines as engines
    from . import hf as hf
    from . import kernels, measure, nn
    from . import parallel as parallel
    from . import states as states
    from .functional.attention import attention
    from .functional.causal_conv1d import causal_conv1d
    from .functional.delta_rule import delta_rule
    from .functional.implied_attention import implied_attention
    from .functional.selective_scan import selective_scan
    from .nearfar import NearFar
    from .states import State

__version__ = "0.1.0"

__all__ = [
    "NearFar",
    "State",
    "attention",
    "causal_conv1d",
    "delta_rule",
    "implied_attention",
    "kernels",
    "measure",
    "nn",
    "selective_scan",
]

# Name -> the module that defines it; subpackages stand for themselves. Torch takes seconds to import, and
# `linattn --help` must not wait for it.
_MODULES = {
    "NearFar": "nearfar",
    "State": "states",
    "attention": "functional.attention",
    "causal_conv1d": "functional.causal_conv1d",
    "delta_rule": "functional.delta_rule",
    "implied_attention": "functional.implied_attention",
    "selective_scan": "functional.selective_scan",
}
_SUBPACKAGES = ("engines", "hf", "kernels", "measure", "nn", "parallel", "states")

if not TYPE_CHECKING:  # hidden from type checkers, so that they still report unknown names

    def __getattr__(name):
        from importlib import import_module

        if name in _SUBPACKAGES:
            return import_module(f".{name}", __name__)
        if name in _MODULES:
            found = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_MODULES, *_SUBPACKAGES} - {"TYPE_CHECKING"})
