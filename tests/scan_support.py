"""What the tests of the selective scan and the causal convolution share: inputs and the float64 definition."""

from typing import Any

import torch
from torch import Tensor

from linattn.ops.causal_conv1d import reference as conv_reference
from linattn.ops.causal_conv1d.call import CausalConv1dCall
from linattn.ops.selective_scan import reference as scan_reference
from linattn.ops.selective_scan.call import SelectiveScanCall

OPTIONAL = ("D", "z", "delta_bias", "state")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(b: int, c: int, t: int, *, seed: int, channels_last: bool) -> Tensor:
    """(b, c, t), in memory as (b, t, c) if channels_last."""
    return draw(b, t, c, seed=seed).mT if channels_last else draw(b, c, t, seed=seed)


def scan_inputs(
    b: int, c: int, n: int, t: int, *, groups: int = 1, channels_last: bool = False, without: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """By the names of selective_scan's arguments; state is a tensor (b, c, n)."""
    made = {
        "u": tokens(b, c, t, seed=1, channels_last=channels_last),
        "delta": tokens(b, c, t, seed=2, channels_last=not channels_last),
        "A": -draw(c, n, seed=3).abs() * 2,
        "B": draw(b, groups, t, n, seed=4).mT,
        "C": draw(b, groups, n, t, seed=5),
        "D": draw(c, seed=6),
        "z": tokens(b, c, t, seed=7, channels_last=channels_last),
        "delta_bias": draw(c, seed=8),
        "state": draw(b, c, n, seed=9),
    }
    return {name: x for name, x in made.items() if name not in without}


def conv_inputs(
    b: int,
    c: int,
    t: int,
    width: int,
    *,
    sequences: int = 1,
    channels_last: bool = False,
    without: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    made = {
        "x": tokens(b, c, t, seed=1, channels_last=channels_last),
        "weight": draw(c, width, seed=2),
        "bias": draw(c, seed=3),
        "state": draw(b * sequences, c, width - 1, seed=4),
    }
    return {name: x for name, x in made.items() if name not in without}


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest number expected."""
    assert got.shape == expected.shape
    if not expected.numel():
        return
    top, error = expected.abs().max().item(), (got.double() - expected.double()).abs().max().item()
    assert error <= tolerance * max(top, 1e-6), f"{error:.3g} off, the largest number being {top:.3g}"


def compare(
    form: Any, definition: Any, inputs: dict[str, Tensor], tolerance: float, dtype: torch.dtype, **options: Any
):
    """Outputs, states and all gradients of two forms of one rule, which take a description of a call -> (out, state).

    The definition gets the same numbers in float64, as rounded to `dtype`.
    """
    mine = {name: _cast(x, dtype).requires_grad_() for name, x in inputs.items()}
    truth = {name: x.detach().double().requires_grad_() for name, x in mine.items()}
    call = SelectiveScanCall if "u" in inputs else CausalConv1dCall
    results, expected = form(call(**mine, **options)), definition(call(**truth, **options))
    for got, want in zip(results, expected, strict=True):
        close(got, want, tolerance)
    ups = [draw(*x.shape, seed=20 + i) for i, x in enumerate(expected)]
    pairs = [(x, y, up) for x, y, up in zip(results, expected, ups, strict=True) if y.requires_grad and y.numel()]
    if not pairs:
        return
    got = torch.autograd.grad(
        [x for x, _, _ in pairs], list(mine.values()), [up.to(x.dtype) for x, _, up in pairs], allow_unused=True
    )
    rounded = [up.to(x.dtype).double() for x, _, up in pairs]
    want = torch.autograd.grad([y for _, y, _ in pairs], list(truth.values()), rounded, allow_unused=True)
    for x, y, like in zip(got, want, truth.values(), strict=True):
        close(torch.zeros_like(like) if x is None else x, torch.zeros_like(like) if y is None else y, tolerance)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A leaf of its own with the same strides."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=dtype)
    return made.copy_(x)


selective_scan = scan_reference.selective_scan
causal_conv1d = conv_reference.causal_conv1d
