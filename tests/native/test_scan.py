"""The native selective scan and causal convolution: every instruction set against the float64 definition, as torch operators,
on any number of threads."""

import pytest
import torch

import scan_support as support
from linattn.ops.causal_conv1d import shifts
from linattn.ops.causal_conv1d.call import CausalConv1dCall
from linattn.ops.selective_scan.call import SelectiveScanCall
from native_support import isa, needs_native  # noqa: F401
from scan_support import OPTIONAL, close, compare, conv_inputs, scan_inputs

pytestmark = needs_native

SCANS = [  # batch, channels, groups, states, tokens, channels last
    (2, 37, 1, 16, 130, False),
    (1, 64, 2, 16, 65, True),
    (2, 5, 1, 3, 1, True),
    (1, 51, 3, 20, 200, False),
    (1, 16, 1, 1, 64, True),
]
CONVS = [  # batch, channels, tokens, width, channels last, bounds
    (2, 37, 130, 4, False, None),
    (1, 64, 65, 3, True, [0, 1, 1, 40, 65]),
    (2, 20, 1, 4, True, None),
    (2, 20, 2, 8, False, None),
    (1, 16, 200, 2, True, [0, 64, 200]),
    (1, 33, 70, 5, True, None),
]


@pytest.fixture
def native():
    from linattn.engines.native import causal_conv1d, selective_scan

    return selective_scan, causal_conv1d


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SCANS)
@pytest.mark.parametrize("bare", [False, True])
def test_scan(isa, native, shape, bare):  # noqa: F811
    b, c, groups, n, t, last = shape
    inputs = scan_inputs(b, c, n, t, groups=groups, channels_last=last, without=OPTIONAL if bare else ())
    if bare:
        inputs["delta"] = inputs["delta"].abs()
    compare(native[0].selective_scan, support.selective_scan, inputs, 2e-6, torch.float32, delta_softplus=not bare)


@pytest.mark.parametrize("shape", CONVS)
@pytest.mark.parametrize("silu", [True, False])
def test_conv(isa, native, shape, silu):  # noqa: F811
    b, c, t, width, last, bounds = shape
    sequences = 1 if bounds is None else len(bounds) - 1
    inputs = conv_inputs(
        b, c, t, width, sequences=sequences, channels_last=last, without=() if silu else ("bias", "state")
    )
    compare(
        native[1].causal_conv1d, support.causal_conv1d, inputs, 2e-6, torch.float32, silu=silu, mask=None, bounds=bounds
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half(isa, native, dtype):  # noqa: F811
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3
    for last in (False, True):
        inputs = scan_inputs(1, 21, 16, 35, channels_last=last)
        compare(native[0].selective_scan, support.selective_scan, inputs, tolerance, dtype, delta_softplus=True)
        inputs = conv_inputs(1, 21, 35, 4, channels_last=last)
        compare(native[1].causal_conv1d, support.causal_conv1d, inputs, tolerance, dtype, silu=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_torchs(native, dtype):
    """Every finite half goes through unchanged; halfway cases round to even."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = every.masked_fill(~every.isfinite(), 1).reshape(1, -1, 8)
    weight = torch.tensor([0.0, 1.0]).expand(finite.shape[1], 2)
    out, _ = native[1].causal_conv1d(CausalConv1dCall(finite, weight))
    assert torch.equal(out, finite)
    half = torch.tensor([0.0, 1 + 2.0**-9]).expand(finite.shape[1], 2)
    out, _ = native[1].causal_conv1d(CausalConv1dCall(finite, half))
    assert torch.equal(out, (finite.float() * (1 + 2.0**-9)).to(dtype))


def test_one_token_steps(isa, native):  # noqa: F811
    b, c, n, t = 2, 37, 20, 6
    inputs = {name: x.float() for name, x in scan_inputs(b, c, n, t, channels_last=True).items()}
    whole, end = native[0].selective_scan(SelectiveScanCall(**inputs, delta_softplus=True))
    h = inputs.pop("state").clone()
    order = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    for i in range(t):
        token = [inputs[name] if name in ("A", "D", "delta_bias") else inputs[name][..., i : i + 1] for name in order]
        out, after = native[0].decode(SelectiveScanCall(*token, h, True), out_state=h)
        assert after is h
        close(out, whole[..., i : i + 1], 1e-5)
    close(h, end, 1e-5)


def test_any_number_of_threads(native, threads):
    inputs = {name: x.float().requires_grad_() for name, x in scan_inputs(1, 100, 16, 300).items()}
    conv = {name: x.float().requires_grad_() for name, x in conv_inputs(1, 100, 900, 4).items()}

    def run():
        out, last = native[0].selective_scan(SelectiveScanCall(**inputs, delta_softplus=True))
        convolved, kept = native[1].causal_conv1d(CausalConv1dCall(**conv, silu=True))
        results = [out, last, convolved, kept]
        leaves = [*inputs.values(), *conv.values()]
        return results + list(torch.autograd.grad([x.square().sum() for x in results], leaves))

    threads(1)
    alone = run()
    for count in (2, 5):
        threads(count)
        for got, want in zip(run(), alone, strict=True):
            close(got, want, 1e-5)


def test_masked_convolution(native):
    inputs = conv_inputs(2, 5, 40, 4, sequences=2)
    mask = support.draw(2, 40, seed=11) > 0
    options = {"mask": mask, "bounds": [0, 13, 40], "silu": True}
    compare(native[1].causal_conv1d, shifts.causal_conv1d, inputs, 1e-5, torch.float32, **options)


def test_opcheck(native):
    for last in (False, True):
        scan = {
            name: x.float().requires_grad_()
            for name, x in scan_inputs(1, 6, 3, 70, groups=2, channels_last=last).items()
        }
        order = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "state")
        torch.library.opcheck(torch.ops.linattn.selective_scan, (*(scan[name] for name in order), True, True))
        some = [None if name in OPTIONAL else scan[name] for name in order]
        torch.library.opcheck(torch.ops.linattn.selective_scan, (*some, False, True))
        conv = {name: x.float().requires_grad_() for name, x in conv_inputs(1, 6, 9, 3, channels_last=last).items()}
        torch.library.opcheck(torch.ops.linattn.causal_conv1d, (*conv.values(), [0, 9], True))


def test_no_second_derivative(native):
    inputs = {name: x.float().requires_grad_() for name, x in conv_inputs(1, 4, 6, 3).items()}
    out, _ = native[1].causal_conv1d(CausalConv1dCall(**inputs))
    (grad,) = torch.autograd.grad(out.square().sum(), inputs["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.sum().backward()
