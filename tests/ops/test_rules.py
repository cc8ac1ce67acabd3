"""What holds for both rules: the chunked torch forms against the step-by-step definitions, and their invariants."""

import itertools
from dataclasses import replace

import pytest
import torch

from linattn.ops import segments
from rules_support import DECAYS, assert_chunked_equals_definition, assert_same, make, poisoned, results

RULES = ("delta", "sums")


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of one chunk."""
    monkeypatch.setattr(segments, "BUDGET", 1)
    monkeypatch.setattr(segments, "COMPILED_BUDGET", 1)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 2, 15, 33, 64, 65, 131])
def test_outputs_states_and_gradients(rule, T, decay):
    assert_chunked_equals_definition(make(rule, T, decay))


@pytest.mark.parametrize("decay", DECAYS)
def test_many_segments(rule, decay, short_segments):
    assert_chunked_equals_definition(make(rule, 201, decay, mask=True))


@pytest.mark.parametrize("heads", [(2, 1, 4), (6, 1, 2), (1, 3, 3), (3, 1, 1)])
def test_head_maps(rule, heads):
    for decay in ("head", "channel"):
        assert_chunked_equals_definition(make(rule, 40, decay, heads=heads))


@pytest.mark.parametrize("decay", DECAYS)
def test_masked_tokens_have_no_effect(rule, decay, short_segments):
    """Whatever they hold; their gradients are 0, and the rest equals the same tokens without them."""
    inputs = make(rule, 100, decay, mask=True)
    clean, spoiled = results(inputs, "chunk"), results(poisoned(inputs), "chunk")
    assert_same(spoiled, clean, 0.0)
    for name in ("key", "value"):
        assert not spoiled[name].movedim(2, 1)[~inputs.mask].any()
    seen = torch.arange(100) % 3 != 1
    inputs = replace(make(rule, 100, decay), mask=seen.expand(2, -1))
    kept = replace(
        inputs, **{name: x[:, :, seen] for name, x in inputs.tensors().items() if name != "state"}, mask=None
    )
    (out, final), (expected, last) = inputs.run("chunk"), kept.run("chunk")
    assert_same({"out": out[:, :, seen], "final": final}, {"out": expected, "final": last})


@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences(rule, decay):
    """Of very different lengths, empty ones among them, each from a state of its own."""
    bounds = [0, 0, 1, 4, 90, 90, 93, 160]
    inputs = make(rule, 160, decay, bounds=bounds, mask=True, heads=(4, 1, 2))
    assert_chunked_equals_definition(inputs)
    out, final = inputs.run("chunk")
    states = inputs.state.unflatten(0, (2, 7))
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = replace(inputs.tokens(start, end, states[:, i]), bounds=None)
        rows, last = alone.run("chunk")
        assert_same(
            {"out": out[:, :, start:end], "final": final.unflatten(0, (2, 7))[:, i]}, {"out": rows, "final": last}
        )


@pytest.mark.parametrize("decay", DECAYS)
def test_any_split_is_one_call(rule, decay):
    inputs = make(rule, 150, decay, mask=True)
    expected, last = inputs.run("chunk")
    rows, state = [], inputs.state
    for start, end in ((0, 1), (1, 64), (64, 130), (130, 150)):
        part, state = inputs.tokens(start, end, state).run("chunk")
        rows.append(part)
    assert_same({"out": torch.cat(rows, 2), "final": state}, {"out": expected, "final": last})


@pytest.mark.parametrize("decay", DECAYS)
def test_later_tokens_change_nothing_earlier(rule, decay):
    """To the bit, in float32."""
    inputs = make(rule, 150, decay, dtype=torch.float32)
    changed = make(rule, 150, decay, dtype=torch.float32, seed=1)
    for cut in (1, 63, 100):
        mixed = {
            name: torch.cat([x[:, :, :cut], getattr(changed, name)[:, :, cut:]], 2)
            for name, x in inputs.tensors().items()
            if name != "state"
        }
        assert torch.equal(replace(inputs, **mixed).run("chunk")[0][:, :, :cut], inputs.run("chunk")[0][:, :, :cut])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_tokens_are_widened(rule, dtype):
    """Only the rounding of the inputs and of the output is left; the state is float32."""
    inputs = make(rule, 100, "head", dtype=torch.float32)
    narrow = replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in ("query", "key", "value")})
    out, final = narrow.run("chunk")
    assert out.dtype == dtype
    assert final.dtype == torch.float32
    expected, last = narrow.map(lambda x: x.double()).run("reference")
    assert_same({"final": final}, {"final": last}, 1e-5)
    assert_same(
        {"out": out}, {"out": expected}, {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    )


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("rate", [0.0, -1e-6, -20.0, -1e4])
def test_extreme_decays(rule, decay, rate):
    """Constant, and mixed with tokens that decay nothing: no exponent is formed as a difference of long sums."""
    inputs = make(rule, 130, decay, dtype=torch.float32)
    constant = torch.full_like(inputs.log_decay, rate)
    for g in (constant, torch.where(inputs.log_decay < -0.5, constant, inputs.log_decay)):
        case = replace(inputs, log_decay=g)
        assert_same(results(case, "chunk"), results(case.map(lambda x: x.double()), "reference"), 3e-5)


def test_second_derivatives(rule, short_segments):
    inputs = make(rule, 70, "channel", B=1, heads=(1, 1, 1), D=2, M=1, mask=True)
    names = list(inputs.tensors())

    def call(*tensors):
        return replace(inputs, **dict(zip(names, tensors, strict=True))).run("chunk")

    leaves = [x.requires_grad_() for x in inputs.tensors().values()]
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_backward_pass_keeps_states_only(rule, short_segments):
    """Beyond the inputs, one state for each segment: no features or scores of all tokens."""
    inputs = make(rule, 640, "channel", B=1, heads=(1, 1, 1), D=8, M=8).map(lambda x: x.requires_grad_())
    kept = {}

    def note(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        inputs.run("chunk")
    known = {x.data_ptr() for x in inputs.tensors().values()}
    assert sum(n for address, n in kept.items() if address not in known) <= 10 * 8 * 8


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler, of itself
def test_compile_has_no_graph_breaks(rule, short_segments):
    torch._dynamo.reset()
    inputs = make(rule, 70, "channel", mask=True)
    names = list(inputs.tensors())
    leaves = [x.requires_grad_() for x in inputs.tensors().values()]

    def call(*tensors):
        return replace(inputs, **dict(zip(names, tensors, strict=True))).run("chunk")

    out, final = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    grads = torch.autograd.grad(out.sin().sum() + final.cos().sum(), leaves)
    got = {"out": out, "final": final, **dict(zip(names, grads, strict=True))}
    assert_same(got, results(inputs, "reference"))


def test_transforms(rule, short_segments):
    """vmap over a further dimension, and torch.func.grad."""
    inputs = make(rule, 100, "head")
    many = torch.stack([inputs.value, 2 * inputs.value])
    out = torch.vmap(lambda v: replace(inputs, value=v).run("chunk")[0])(many)
    assert_same({"out": out[1]}, {"out": replace(inputs, value=many[1]).run("chunk")[0]})
    loss = torch.func.grad(lambda v: replace(inputs, value=v).run("chunk")[0].sin().sum())(inputs.value)
    leaf = inputs.value.clone().requires_grad_()
    expected = torch.autograd.grad(replace(inputs, value=leaf).run("chunk")[0].sin().sum(), leaf)[0]
    assert_same({"grad": loss}, {"grad": expected})
