"""Times of exact attention and of one kernel on this machine, for the explorer's chart of costs."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional.attention import attention
from ..functional.delta_rule import delta_rule
from ..kernels import Elu, Kernel, Polynomial, Positive, Relu, Taylor, Trig
from ..measure.clock import timing
from ..measure.machine import machine
from ..nearfar import NearFar

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LARGEST = 1024  # of dim, features, window, slots: more would keep the page waiting


def kernel_of(settings: Mapping[str, Any], dim: int) -> Kernel | None:
    """The kernel that the page's settings name; None for the delta rule."""
    name = settings["kernel"]
    features, seed = _number(settings, "features", 64), _number(settings, "seed", 0, 0)
    if name == "positive":
        return Positive(dim, features, seed=seed)
    if name in ("trig", "trig-raw"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the raw form says that it is for study, as the page does
            return Trig(dim, features, normalize=name == "trig", seed=seed)
    if name == "nearfar":
        names = ("window", "slots", "sinks", "block")
        return NearFar(*(_number(settings, key, 16, 1 if key == "block" else 0) for key in names))
    made: dict[str, type[Kernel]] = {"elu": Elu, "relu": Relu, "polynomial": Polynomial, "taylor": Taylor}
    if name in made:
        return made[name]()
    if name == "delta":
        return None
    raise ValueError(f"unknown kernel {name!r} in the page's settings.")


def measure_times(
    settings: Mapping[str, Any], dim: int, *, lengths: Sequence[int] = LENGTHS, seconds: float = 0.05
) -> dict[str, Any]:
    """Seconds of one head, float32, by number of tokens: {"lengths", "exact", "kernel", "machine", "name"}."""
    if not 1 <= dim <= LARGEST:
        raise ValueError(f"dim must be 1 to {LARGEST}, got {dim}.")
    causal = bool(settings.get("causal", True))
    kernel = kernel_of(settings, dim)
    exact, other = [], []
    for n in lengths:
        q, k, v = torch.randn(3, 1, 1, n, dim, generator=torch.Generator().manual_seed(0))
        exact.append(_best(lambda q=q, k=k, v=v: attention(q, k, v, kernel="softmax", is_causal=causal), seconds))
        if kernel is None:
            beta = torch.full((1, 1, n), 0.5)
            other.append(_best(lambda q=q, k=k, v=v, b=beta: delta_rule(q, k, v, beta=b, normalize_qk=True), seconds))
        else:
            other.append(_best(lambda q=q, k=k, v=v: attention(q, k, v, kernel=kernel, is_causal=causal), seconds))
    about = machine()
    where = f"{about['processor']}, {about['threads']} threads, torch {about['torch']}"
    return {"lengths": list(lengths), "exact": exact, "kernel": other, "machine": where, "name": settings["kernel"]}


def _best(call: Any, seconds: float) -> float:
    @torch.no_grad()
    def run() -> Tensor:
        out: Tensor = call()
        return out

    return float(timing(run, seconds=seconds).best)


def _number(settings: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    value = settings.get(name, default)
    most = 2**32 - 1 if name == "seed" else LARGEST
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")
    return value
