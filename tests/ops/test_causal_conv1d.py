"""linattn.causal_conv1d: the torch form against the definition, masks, packing, states, splits, dtypes, errors."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import linattn
import scan_support as support
from linattn.ops.causal_conv1d import shifts
from linattn.ops.causal_conv1d.call import CausalConv1dCall
from linattn.states import ConvState, ScanState
from scan_support import close, compare, conv_inputs, draw

ENGINES = ("torch", "native")


@pytest.mark.parametrize("engine", ENGINES)
def test_is_torchs_convolution(engine):
    x, weight, bias = draw(2, 6, 50).float(), draw(6, 4, seed=1).float(), draw(6, seed=2).float()
    expected = F.conv1d(x, weight.unsqueeze(1), bias, padding=3, groups=6)[..., :50]
    close(linattn.causal_conv1d(x, weight, bias, engine=engine), expected, 1e-5)
    close(linattn.causal_conv1d(x, weight, bias, activation="silu", engine=engine), F.silu(expected), 1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_torch_form_is_the_definition(data):
    b, c, t, width = (data.draw(st.integers(*ends)) for ends in ((1, 2), (1, 3), (1, 20), (2, 8)))
    mask, bounds = data.draw(masks(b, t)), data.draw(packings(t))
    without = () if data.draw(st.booleans()) else ("bias", "state")
    inputs = conv_inputs(b, c, t, width, sequences=1 if bounds is None else len(bounds) - 1, without=without)
    options = {"mask": mask, "bounds": bounds, "silu": data.draw(st.booleans())}
    compare(shifts.causal_conv1d, support.causal_conv1d, inputs, 1e-10, torch.float64, **options)


@st.composite
def masks(draw, b, t):
    if draw(st.booleans()):
        return None
    return torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=b, max_size=b)))


@st.composite
def packings(draw, t):
    if draw(st.booleans()):
        return None
    return [0, *sorted(draw(st.lists(st.integers(0, t), max_size=4))), t]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_any_split_is_one_call(engine, width):
    inputs = {name: x.float() for name, x in conv_inputs(2, 19, 40, width, channels_last=True).items()}
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    options = {"activation": "silu", "return_state": True, "engine": engine}
    start = ConvState("causal_conv1d", inputs["state"])
    whole, end = linattn.causal_conv1d(x, weight, bias, state=start, **options)
    for cuts in ([40], [1] * 40, [3, 0, 30, 7], [39, 1]):
        rows, state = [], start
        for piece in x.split(cuts, -1):
            row, state = linattn.causal_conv1d(piece, weight, bias, state=state, **options)
            rows.append(row)
        close(torch.cat(rows, -1), whole, 1e-6)
        assert state == end
    assert torch.equal(end.inputs, x[..., 41 - width :])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_masked_token_is_not_there(engine):
    """Whatever it holds, and wherever it stands: also its gradient is 0."""
    x, weight, bias = draw(2, 5, 30).float(), draw(5, 4, seed=1).float(), draw(5, seed=2).float()
    mask = draw(2, 30, seed=3) > 0
    mask[:, -2:] = False
    spoiled = x.masked_fill(~mask.unsqueeze(1), torch.nan).requires_grad_()
    options = {"activation": "silu", "return_state": True, "engine": engine}
    out, state = linattn.causal_conv1d(spoiled, weight, bias, key_mask=mask, **options)
    for i in range(2):
        alone, end = linattn.causal_conv1d(x[i : i + 1, :, mask[i]], weight, bias, **options)
        close(out[i : i + 1, :, mask[i]], alone, 1e-6)
        assert torch.equal(state.inputs[i], end.inputs[0])
        assert not out[i, :, ~mask[i]].any()
    (grad,) = torch.autograd.grad(out.sum() + state.inputs.sum(), spoiled)
    assert torch.isfinite(grad).all()
    assert not grad.masked_select(~mask.unsqueeze(1)).any()


@pytest.mark.parametrize("engine", ENGINES)
def test_left_padding_is_what_transformers_makes_of_it(engine):
    """There the input of a padding token is set to 0 before the convolution, and its output after it."""
    x, weight = draw(2, 5, 12).float(), draw(5, 4, seed=1).float()
    mask = torch.arange(12) >= torch.tensor([[0], [5]])
    zeroed = F.silu(F.conv1d(x * mask.unsqueeze(1), weight.unsqueeze(1), padding=3, groups=5)[..., :12])
    out = linattn.causal_conv1d(x, weight, activation="silu", key_mask=mask, engine=engine)
    close(out, zeroed * mask.unsqueeze(1), 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_do_not_see_each_other(engine, masked):
    x, weight = draw(2, 5, 30).float(), draw(5, 3, seed=1).float()
    mask = draw(2, 30, seed=3) > 0 if masked else None
    bounds = [0, 1, 1, 20, 30]
    start = ConvState("causal_conv1d", draw(2, 4, 5, 2, seed=4).float())
    options = {"activation": "silu", "return_state": True, "engine": engine}
    out, state = linattn.causal_conv1d(
        x, weight, cu_seqlens=torch.tensor(bounds), key_mask=mask, state=start, **options
    )
    assert state.inputs.shape == (2, 4, 5, 2)
    for i, (a, z) in enumerate(itertools.pairwise(bounds)):
        part = None if mask is None else mask[:, a:z]
        before = ConvState("causal_conv1d", start.inputs[:, i])
        alone, end = linattn.causal_conv1d(x[..., a:z], weight, key_mask=part, state=before, **options)
        close(out[..., a:z], alone, 1e-6)
        assert torch.equal(state.inputs[:, i], end.inputs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_in_float32(engine, dtype):
    inputs = {name: x.to(dtype) for name, x in conv_inputs(2, 20, 70, 4, channels_last=True).items()}
    state = ConvState("causal_conv1d", inputs.pop("state"))
    out, last = linattn.causal_conv1d(**inputs, state=state, activation="silu", return_state=True, engine=engine)
    wide = {name: x.double() for name, x in inputs.items()}
    expected = support.causal_conv1d(CausalConv1dCall(**wide, state=state.inputs.double(), silu=True))[0]
    assert (out.dtype, last.inputs.dtype) == (dtype, dtype)
    close(out, expected.to(dtype), 1e-2 if dtype == torch.bfloat16 else 2e-3)
    assert torch.equal(last.inputs, inputs["x"][..., -3:])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(5, 9), (0, 5, 9), (2, 5, 0), (2, 3, 5, 9), (2, 0, 9)])
def test_batch_dimensions_and_zero_sizes(engine, shape):
    x, weight = draw(*shape).float(), draw(shape[-2], 4, seed=1).float()
    out, state = linattn.causal_conv1d(x, weight, return_state=True, engine=engine)
    assert out.shape == shape
    assert state.inputs.shape == (*shape[:-1], 3)
    again = linattn.causal_conv1d(
        x, weight, state=state, engine=engine, key_mask=torch.ones(shape[-1], dtype=torch.bool)
    )
    assert again.shape == shape


@pytest.mark.parametrize("engine", ENGINES)
def test_compiles_without_graph_breaks(engine):
    torch._dynamo.reset()
    x, weight = draw(2, 5, 30).float().requires_grad_(), draw(5, 3, seed=1).float().requires_grad_()
    mask = draw(2, 30, seed=3) > 0

    def function(x, weight):
        plain = linattn.causal_conv1d(x * 2, weight, activation="silu", engine=engine)
        packed = linattn.causal_conv1d(x, weight, cu_seqlens=[0, 10, 30], key_mask=mask, engine=engine)
        return plain + packed

    got, want = torch.compile(function, fullgraph=True, backend="aot_eager")(x, weight), function(x, weight)
    close(got, want, 1e-6)
    grads = torch.autograd.grad(got.sum(), (x, weight))
    for mine, theirs in zip(grads, torch.autograd.grad(want.sum(), (x, weight)), strict=True):
        close(mine, theirs, 1e-5)


def test_state(tmp_path):
    x, weight = draw(2, 5, 9), draw(5, 4, seed=1)
    _, state = linattn.causal_conv1d(x, weight, return_state=True)
    assert repr(state) == "ConvState('causal_conv1d', batch=(2,), channels=5, width=4, float64, 0.2 KiB)"
    state.save(tmp_path / "state.safetensors")
    assert linattn.State.load(tmp_path / "state.safetensors") == state
    with pytest.raises(ValueError, match="keep a clone"):
        state.drop_last(1)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": None}, TypeError, "x must be a tensor"),
        ({"x": torch.ones(5)}, ValueError, r"x must be \(\.\.\., channels, tokens\)"),
        ({"weight": torch.ones(5, 1, 4)}, ValueError, r"squeeze\(1\)"),
        ({"weight": torch.ones(6, 4)}, ValueError, "with 5 channels"),
        ({"weight": torch.ones(5, 1)}, ValueError, "2 to 8, got 1"),
        ({"weight": torch.ones(5, 9)}, ValueError, "2 to 8, got 9"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must be \(channels\) = \(5,\), got \(4,\)"),
        ({"activation": "gelu"}, ValueError, "activation must be None or"),
        ({"key_mask": torch.ones(2, 9)}, TypeError, "bool"),
        ({"key_mask": torch.ones(2, 8, dtype=torch.bool)}, ValueError, "key_mask must be"),
        ({"cu_seqlens": [0, 8]}, ValueError, "cu_seqlens must rise from 0"),
        ({"state": ScanState.empty((2,), 5, 3)}, TypeError, "got ScanState"),
        ({"state": ConvState.empty((2,), 5, 3)}, ValueError, r"\(2, 5, 3\), got \(2, 5, 2\)"),
        ({"cu_seqlens": [0, 4, 9], "state": ConvState.empty((2,), 5, 4)}, ValueError, r"\(2, 2, 5, 3\)"),
        ({"engine": "native"}, ValueError, "float64"),
    ],
)
def test_errors(change, error, says):
    given = {"x": draw(2, 5, 9), "weight": draw(5, 4)}
    with pytest.raises(error, match=says):
        linattn.causal_conv1d(**{**given, **change})
