"""The native operators as torch sees them: opcheck, torch.compile, threads, forks, and odd shapes by hypothesis."""

import copy
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import linattn
import warm_python
from linattn.engines.native.ffi import ISA_LEVELS, library
from linattn.kernels import Elu, Positive
from native_support import DIM, KERNELS, close, native_attention, needs_native, side_by_side, tokens, truth

pytestmark = needs_native


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def arguments(kernel, length=20, value_dim=5, grad=True):
    """What the operators take, for a kernel with a map of its own."""
    from linattn.engines.native.plans import native_map

    fmap = native_map(kernel, None, DIM)
    q, k = (tokens(1, 2, length, DIM, seed=s).requires_grad_(grad) for s in range(2))
    v = tokens(1, 2, length, value_dim, seed=2).requires_grad_(grad)
    S, Z = tokens(1, 2, fmap.form.features, value_dim, seed=3).abs(), tokens(1, 2, fmap.form.features, seed=4).abs()
    sums = [S.requires_grad_(grad), Z.requires_grad_(grad), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.int64)]
    return [q, k, v], sums, [list(fmap.weights), *fmap.numbers()]


@pytest.mark.parametrize("name", ["positive", "elu"])
def test_opcheck(name):
    from linattn.engines.native import autograd as ops

    (q, k, v), sums, fmap = arguments(KERNELS[name]())
    guarded = torch.zeros(1, 2, dtype=torch.int64)
    mask = torch.ones(1, 20, dtype=torch.bool)
    decay = torch.full((1, 2, 20), -0.1, dtype=torch.float64)
    torch.library.opcheck(ops.update_state, (k, v, *sums, mask, None, *fmap))
    torch.library.opcheck(ops.read_state, (q, *sums, guarded, *fmap))
    torch.library.opcheck(ops.causal, (q, k, v, *sums, guarded, None, None, None, *fmap, True))
    fmap[1][2] = 1  # decay is a log-weight
    torch.library.opcheck(ops.causal, (q, k, v, *sums, guarded, mask, decay, None, *fmap, True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_compile_keeps_one_operator_and_its_gradient(is_causal):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    kernel = Positive(DIM, features=24)

    def function(q, k, v):
        return linattn.attention(q * 2, k, v, kernel=kernel, is_causal=is_causal, engine="native")

    torch._dynamo.reset()
    q, k, v = (tokens(1, 2, 40, DIM, seed=s).requires_grad_() for s in range(3))
    got = torch.compile(function, fullgraph=True, backend=backend)(q, k, v)
    close(got, function(q, k, v).detach(), 1e-6)
    targets = [str(n.target) for n in graphs[0].graph.nodes if "linattn" in str(n.target)]
    expected = ["causal"] if is_causal else ["update_state", "read_state"]
    assert [t.split(".")[-2 if t.endswith("default") else -1] for t in targets] == expected
    compiled = torch.autograd.grad(got.square().sum(), (q, k, v))
    for x, y in zip(compiled, torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v)), strict=False):
        close(x, y, 1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["positive", "elu", "trig"])
def test_results_do_not_depend_on_the_number_of_threads(threads, name, is_causal):
    """One head, so that several threads share its tokens."""
    kernel = KERNELS[name]()
    q, k, v = tokens(1, 2, 2100, DIM), tokens(1, 1, 2100, DIM, seed=1), tokens(1, 1, 2100, 8, seed=2)
    mask = tokens(1, 2100, seed=3) > -1
    options = {"log_decay": torch.sigmoid(tokens(1, 1, 2100, seed=4) + 5).log()} if is_causal else {}
    results = []
    for count in (1, 2, 5):
        threads(count)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        call = {"is_causal": is_causal, "key_mask": mask, "return_state": True, **options}
        out, state = native_attention(*inputs, kernel, **call)
        true_S = state.S * state.log_scale.exp()[..., None, None]
        loss = out.square().sum() + true_S.square().sum() * 1e-6
        results.append([out.detach(), true_S.detach(), *torch.autograd.grad(loss, inputs), state.guarded, state.tokens])
    for other in results[1:]:
        for x, y in zip(other, results[0], strict=False):
            close(x, y, 2e-5)


def test_calls_from_many_threads_at_once():
    kernel = Positive(DIM, features=40)
    inputs = [[tokens(1, 2, 150 + i, DIM, seed=3 * i + s) for s in range(3)] for i in range(8)]
    expected = [native_attention(*x, kernel, is_causal=True) for x in inputs]
    failures = []

    def work(i):
        for _ in range(20):
            if not torch.equal(native_attention(*inputs[i], kernel, is_causal=True), expected[i]):
                failures.append(i)

    side_by_side(work, 8)
    assert not failures


class _Attended(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        x = tokens(1, 2, 100, DIM, seed=i)
        return native_attention(x, x, x, Elu(), is_causal=True)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_after_a_fork():
    here = torch.stack([_Attended()[i] for i in range(6)])
    workers = DataLoader(_Attended(), batch_size=3, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(workers)), here)


@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_the_environment_chooses_the_instruction_set(isa):
    code = "from linattn.engines import describe; print(describe()['native'])"
    said = warm_python.run("-c", code, environment={**os.environ, "LINATTN_ISA": isa}, check=True).stdout
    assert f"available: {isa}" in said or f"asks for {isa}, which this CPU does not have" in said


def test_an_unknown_instruction_set_is_named():
    with pytest.raises(ValueError, match="must be one of " + ", ".join(ISA_LEVELS)):
        library.set_isa("sse9")


def test_decoding_step_by_step():
    """The short way of one token, with and without groups, against one long call."""
    for name in ("positive", "elu", "taylor", "trig"):
        kernel = KERNELS[name]()
        q, k, v = tokens(2, 4, 30, DIM), tokens(2, 2, 30, DIM, seed=1), tokens(2, 2, 30, 8, seed=2)
        with torch.no_grad():
            whole, final = native_attention(q, k, v, kernel, is_causal=True, return_state=True)
            rows, state = [], None
            for t in range(30):
                part = (x[:, :, t : t + 1] for x in (q, k, v))
                row, state = native_attention(*part, kernel, is_causal=True, state=state, return_state=True)
                rows.append(row)
        close(torch.cat(rows, 2), whole)
        assert torch.equal(state.tokens, final.tokens)
        close(state.S * state.log_scale.exp()[..., None, None], final.S * final.log_scale.exp()[..., None, None])


def one_step(state, kernel, seed=9, **options):
    q, k, v = (tokens(1, 2, 1, DIM, seed=seed + s) for s in range(3))
    return linattn.attention(q, k, v, kernel=kernel, is_causal=True, state=state, return_state=True, **options)


def test_the_state_of_a_step_is_a_state_like_any_other(tmp_path):
    """A step keeps its state in one buffer, and splits it into tensors on first access."""
    kernel = Positive(DIM, features=19)
    first, twin = (one_step(None, kernel, engine=engine)[1] for engine in ("native", "torch"))
    for look in (
        lambda s: s,
        lambda s: s.clone(),
        copy.copy,
        copy.deepcopy,
        lambda s: s.select([0]),
        lambda s: s.to(torch.float32),
        lambda s: (s.save(tmp_path / "s.safetensors"), linattn.State.load(tmp_path / "s.safetensors"))[1],
        lambda s: (s.nbytes, s)[1],
    ):
        state = look(one_step(one_step(first, kernel, seed=20)[1], kernel, seed=30)[1])
        expected = one_step(one_step(twin, kernel, seed=20, engine="torch")[1], kernel, seed=30, engine="torch")[1]
        out, after = one_step(state, kernel, seed=40)
        close(out, one_step(expected, kernel, seed=40, engine="torch")[0])
        assert set(state.tensors()) == {"S", "Z", "log_scale", "tokens", "guarded"}
        assert int(after.tokens.max()) == 4
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            after.nothing  # noqa: B018


def test_a_packed_state_that_is_changed_stays_changed():
    kernel = Elu()
    state = one_step(one_step(None, kernel)[1], kernel)[1]
    state.S = torch.zeros_like(state.S)
    state.Z.zero_()
    assert int(one_step(state, kernel)[1].tokens.max()) == 3
    close(one_step(state, kernel)[0], tokens(1, 2, 1, DIM, seed=11))  # nothing was left of the tokens before


def test_a_packed_state_follows_the_weights_of_its_kernel():
    kernel, other = Positive(DIM, features=16, seed=1), Positive(DIM, features=16, seed=2)
    state = one_step(one_step(None, kernel)[1], kernel)[1]
    with torch.no_grad():
        kernel.projection.copy_(other.projection)
    tensors = {name: x.clone() for name, x in copy.copy(state).tensors().items()}
    expected = one_step(linattn.states.LinearState(state.kernel, **tensors), kernel, engine="torch")[0]
    close(one_step(state, kernel)[0], expected)
    with pytest.raises(ValueError, match="was made by"):
        one_step(state, Positive(DIM, features=17))


def test_a_packed_state_in_a_compiled_function():
    kernel = Elu()
    state = one_step(one_step(None, kernel)[1], kernel)[1]
    x = [tokens(1, 2, 1, DIM, seed=9 + s) for s in range(3)]
    compiled = torch.compile(
        lambda s: linattn.attention(*x, kernel=kernel, is_causal=True, state=s), fullgraph=True, backend="aot_eager"
    )
    close(compiled(state), one_step(state.clone(), kernel)[0])


def test_a_step_refuses_what_the_long_way_refuses():
    kernel = Positive(DIM, features=24)
    q = tokens(1, 2, 1, DIM)
    _, state = native_attention(q, q, q, kernel, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match="this state was made by"):
        native_attention(q, q, q, Elu(), is_causal=True, state=state, return_state=True)
    with pytest.raises(ValueError, match="key must be finite"):
        native_attention(q, q * torch.nan, q, kernel, is_causal=True, state=state, return_state=True)
    with pytest.raises(ValueError, match="query heads must be a multiple"):
        native_attention(tokens(1, 3, 1, DIM), q, q, kernel, is_causal=True, state=state, return_state=True)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["positive", "positive-wide", "elu", "trig", "taylor", "custom"]),
    isa=st.sampled_from(ISA_LEVELS),
    groups=st.integers(1, 3),
    length=st.integers(1, 140),
    extra=st.integers(-40, 40),
    value_dim=st.integers(1, 40),
    is_causal=st.booleans(),
    masked=st.booleans(),
    split=st.integers(0, 140),
)
def test_any_shape_in_any_parts(name, isa, groups, length, extra, value_dim, is_causal, masked, split):
    """Outputs of one call, and of two that hand on a state, against the O(N^2) twin."""
    before = library.isa
    try:
        library.set_isa(isa)
    except ValueError:
        return
    try:
        kernel = KERNELS[name]()
        keys = max(1, length + extra)
        q, k = tokens(1, 2 * groups, length, DIM), tokens(1, 2, keys, DIM, seed=1)
        v = tokens(1, 2, keys, value_dim, seed=2)
        mask = tokens(1, keys, seed=3) > -1 if masked else None
        with torch.no_grad():
            expected = truth(q, k, v, kernel, is_causal=is_causal, key_mask=mask)
            close(native_attention(q, k, v, kernel, is_causal=is_causal, key_mask=mask), expected, 5e-5)
            if is_causal and keys == length and 0 < split < length:
                parts = [[x[:, :, a:b] for x in (q, k, v)] for a, b in ((0, split), (split, length))]
                masks = [None, None] if mask is None else [mask[:, :split], mask[:, split:]]
                options = {"is_causal": True, "return_state": True}
                first, state = native_attention(*parts[0], kernel, key_mask=masks[0], **options)
                second, _ = native_attention(*parts[1], kernel, key_mask=masks[1], state=state, **options)
                close(torch.cat([first, second], 2), expected, 5e-5)
    finally:
        library.set_isa(before)
