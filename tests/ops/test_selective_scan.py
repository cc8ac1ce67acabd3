"""linattn.selective_scan: the torch form against the definition, states, splits, dtypes, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn
import scan_support as support
from linattn.ops.selective_scan import chunk
from linattn.ops.selective_scan.call import SelectiveScanCall
from linattn.states import ConvState, ScanState
from scan_support import OPTIONAL, close, compare, draw, scan_inputs

ENGINES = ("torch", "native")


@pytest.mark.parametrize("without", [(), OPTIONAL])
@pytest.mark.parametrize("softplus", [True, False])
def test_torch_form_is_the_definition(without, softplus, monkeypatch):
    monkeypatch.setattr(chunk, "BUDGET", 1)  # chunks of 16
    inputs = scan_inputs(2, 6, 3, 37, groups=2, without=without)
    if not softplus:
        inputs["delta"] = inputs["delta"].abs()
    compare(chunk.selective_scan, support.selective_scan, inputs, 1e-10, torch.float64, delta_softplus=softplus)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 40),
    st.booleans(),
    st.integers(0, 40),
)
def test_any_split_is_one_call(b, groups, each, n, t, native, cut):
    inputs = scan_inputs(b, groups * each, n, t, groups=groups, channels_last=native)
    kind = torch.float32 if native else torch.float64
    inputs = {name: x.to(kind) for name, x in inputs.items()}
    h = ScanState("selective_scan", inputs.pop("state"))
    fixed = {name: inputs.pop(name) for name in ("A", "D", "delta_bias")}
    options = {"delta_softplus": True, "return_state": True}
    whole, end = linattn.selective_scan(**inputs, **fixed, state=h, **options)
    cut = min(cut, t)
    first, middle = linattn.selective_scan(
        **{name: x[..., :cut] for name, x in inputs.items()}, **fixed, state=h, **options
    )
    rest, last = linattn.selective_scan(
        **{name: x[..., cut:] for name, x in inputs.items()}, **fixed, state=middle, **options
    )
    close(torch.cat([first, rest], -1), whole, 1e-5)
    close(last.h, end.h, 1e-5)
    wide = {name: x.double() for name, x in {**inputs, **fixed}.items()}
    truth = support.selective_scan(SelectiveScanCall(**wide, state=h.h.double(), delta_softplus=True))
    close(whole, truth[0], 3e-4)
    close(end.h, truth[1], 3e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_numerics(engine):
    """Steps of 1e4, decays of exactly 1 and of almost 1, softplus."""
    kind = torch.float32
    t = 3000
    u, ones = torch.ones(1, 1, t, dtype=kind), torch.ones(1, 1, t, dtype=kind)
    A = torch.tensor([[-1.0]], dtype=kind)
    large = linattn.selective_scan(u, ones * 1e4, A, ones, ones, engine=engine)
    close(large, torch.full_like(large, 1e4), 1e-6)
    nothing = linattn.selective_scan(u, ones * 0.5, torch.zeros(1, 1), ones, ones, engine=engine)
    assert torch.equal(nothing, torch.arange(1, t + 1, dtype=kind).expand(1, 1, t) * 0.5)
    start = ScanState("selective_scan", torch.ones(1, 1, 1))
    dt = 3e-6
    slow = linattn.selective_scan(u * 0, ones * dt, A, ones, ones, state=start, engine=engine)
    expected = torch.exp(-dt * torch.arange(1, t + 1, dtype=torch.float64))
    close(slow[0, 0], expected, 5e-5 if engine == "native" else 1e-4)  # torch rounds exp(-dt), both round h
    raw = torch.tensor([-100.0, -20.0, 0.0, 19.9, 20.1, 100.0], dtype=kind).expand(1, 1, 6)
    one = torch.ones(1, 1, 6)
    stepped = linattn.selective_scan(one, raw, -torch.ones(1, 1) * 1e30, one, one, delta_softplus=True, engine=engine)
    close(stepped, torch.nn.functional.softplus(raw), 1e-6)
    assert stepped[0, 0, 1] == pytest.approx(2.0611537e-9, rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_causality_bit_for_bit(engine):
    inputs = {name: x.float() for name, x in scan_inputs(1, 20, 16, 100, without=("state",)).items()}
    before = linattn.selective_scan(**inputs, delta_softplus=True, engine=engine)
    for name in ("u", "delta", "z", "B", "C"):
        changed = inputs[name].clone()
        changed[..., 70:] = 100
        after = linattn.selective_scan(**{**inputs, name: changed}, delta_softplus=True, engine=engine)
        assert torch.equal(after[..., :70], before[..., :70]), name


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_batch_dimensions(engine, batch):
    u, delta = draw(*batch, 4, 9, seed=1).float(), draw(*batch, 4, 9, seed=2).float()
    A, B, C = -torch.rand(4, 5), draw(*batch, 2, 5, 9, seed=3).float(), draw(*batch, 2, 5, 9, seed=4).float()
    out, state = linattn.selective_scan(u, delta, A, B, C, delta_softplus=True, return_state=True, engine=engine)
    assert out.shape == u.shape
    assert state.h.shape == (*batch, 4, 5)
    again = linattn.selective_scan(u, delta, A, B, C, delta_softplus=True, state=state, engine=engine)
    assert again.shape == u.shape
    flat = linattn.selective_scan(
        u.reshape(-1, 4, 9),
        delta.reshape(-1, 4, 9),
        A,
        B.reshape(-1, 2, 5, 9),
        C.reshape(-1, 2, 5, 9),
        delta_softplus=True,
    )
    close(out.reshape(-1, 4, 9), flat, 1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_in_float32(engine, dtype):
    inputs = {name: x.float() for name, x in scan_inputs(2, 20, 16, 70, channels_last=True).items()}
    halves = {name: inputs[name].to(dtype) for name in ("u", "delta", "z", "B", "C")}
    state = ScanState("selective_scan", inputs.pop("state"))
    out, last = linattn.selective_scan(
        **{**inputs, **halves}, state=state, return_state=True, delta_softplus=True, engine=engine
    )
    wide = {name: x.float() for name, x in halves.items()}
    expected, end = linattn.selective_scan(
        **{**inputs, **wide}, state=state, return_state=True, delta_softplus=True, engine="torch"
    )
    assert (out.dtype, last.h.dtype) == (dtype, torch.float32)
    close(out, expected.to(dtype), 1e-2 if dtype == torch.bfloat16 else 2e-3)
    close(last.h, end.h, 1e-5)


def test_compiles_without_graph_breaks():
    inputs = {name: x.float() for name, x in scan_inputs(1, 4, 3, 40, without=("state",)).items()}
    for engine in ENGINES:
        torch._dynamo.reset()

        def function(engine=engine, **named):
            return linattn.selective_scan(**named, delta_softplus=True, return_state=True, engine=engine)[0] * 2

        mine = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(**mine)
        want = function(**mine)
        close(got, want, 1e-5)
        grads = torch.autograd.grad(got.sum(), list(mine.values()))
        for x, y in zip(grads, torch.autograd.grad(want.sum(), list(mine.values())), strict=True):
            close(x, y, 1e-5)


def test_second_derivatives_and_transforms_of_the_torch_form():
    inputs = [x.requires_grad_() for x in scan_inputs(1, 2, 2, 5, without=("D", "delta_bias", "state")).values()]

    def function(u, delta, A, B, C, z):
        return linattn.selective_scan(u, delta, A, B, C, z=z, delta_softplus=True)

    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-6)
    jacobian = torch.func.jacrev(lambda u: function(u, *inputs[1:]).sum())(inputs[0])
    (expected,) = torch.autograd.grad(function(*inputs).sum(), inputs[:1])
    close(jacobian, expected, 1e-10)


def test_state(tmp_path):
    inputs = scan_inputs(2, 4, 3, 6, without=("state",))
    _, state = linattn.selective_scan(**inputs, return_state=True)
    assert isinstance(state, ScanState)
    assert repr(state) == "ScanState('selective_scan', batch=(2,), channels=4, n=3, float64, 0.2 KiB)"
    state.save(tmp_path / "state.safetensors")
    assert linattn.State.load(tmp_path / "state.safetensors") == state
    assert state.select([1, 1]).h.shape == (2, 4, 3)
    assert state.clone() == state
    with pytest.raises(ValueError, match="keep a clone"):
        state.drop_last(1)


def good():
    return scan_inputs(2, 6, 3, 5, groups=2, without=("state",))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"u": [1]}, TypeError, "u must be a tensor"),
        ({"u": torch.ones(2, 6, 5, dtype=torch.int64)}, TypeError, "floating point"),
        ({"u": torch.ones(5)}, ValueError, r"u must be \(\.\.\., channels, tokens\), got \(5,\)"),
        ({"delta": torch.ones(2, 6, 4)}, ValueError, r"delta must be of the shape of u = \(2, 6, 5\), got \(2, 6, 4\)"),
        ({"z": torch.ones(2, 5, 6)}, ValueError, "z must be of the shape of u"),
        ({"A": torch.ones(5, 3)}, ValueError, r"A must be \(channels, n\) with 6 channels"),
        ({"A": torch.ones(6)}, ValueError, "A must be"),
        ({"B": torch.ones(2, 4, 3, 5)}, ValueError, "must divide the 6 channels"),
        ({"B": torch.ones(2, 3, 5)}, ValueError, "B and C must have the same groups"),
        ({"C": torch.ones(2, 2, 4, 5)}, ValueError, r"C must be \(\.\.\., n, tokens\)"),
        ({"D": torch.ones(6, 1)}, ValueError, r"D must be \(channels\) = \(6,\), got \(6, 1\)"),
        ({"delta_bias": torch.ones(5)}, ValueError, "delta_bias must be"),
        ({"state": torch.ones(2, 6, 3)}, TypeError, "state must be a ScanState"),
        ({"state": ConvState.empty((2,), 6, 4)}, TypeError, "got ConvState"),
        ({"state": ScanState.empty((2,), 6, 4)}, ValueError, r"\(2, 6, 3\), got \(2, 6, 4\)"),
        ({"engine": "cuda"}, ValueError, "unknown engine"),
        ({"engine": "native"}, ValueError, "float64"),
        ({"D": torch.ones(6, device="meta")}, ValueError, "one device"),
    ],
)
def test_errors(change, error, says):
    with pytest.raises(error, match=says):
        linattn.selective_scan(**{**good(), **change})
