"""linattn.delta_rule: its arguments one by one, its state, what is refused, and random calls against the definition."""

import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import assert_type

import linattn
from linattn import State
from linattn.engines import ENGINES, EngineName
from linattn.functional.decayed_sums import decayed_sums
from linattn.ops.decayed_sums.call import DecayedSumsCall
from linattn.ops.decayed_sums.reference import decayed_sums as sums_definition
from linattn.ops.delta_rule.call import DeltaRuleCall
from linattn.ops.delta_rule.reference import delta_rule as definition
from linattn.ops.delta_rule.transition import transition
from linattn.states import RecurrentState, Snapshots
from rules_support import close, make, tokens

TOLERANCE = {torch.float64: 1e-8, torch.float32: 3e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def types(flag: bool = True) -> None:
    """What type checkers see."""
    q, k, v, gates = tokens(1, T=3)
    beta = gates["beta"]
    assert_type(linattn.delta_rule(q, k, v, beta=beta), Tensor)
    assert_type(linattn.delta_rule(q, k, v, beta=beta, return_state=True), tuple[Tensor, State])
    assert_type(linattn.delta_rule(q, k, v, beta=beta, return_state=flag), Tensor | tuple[Tensor, State])


def test_types_and_engine_names():
    types()
    assert typing.get_args(EngineName) == ENGINES


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3), (0,), (2, 0)])
def test_any_number_of_batch_dimensions(batch):
    q, k, v, gates = tokens(*batch)
    out, state = linattn.delta_rule(q, k, v, **gates, return_state=True)
    assert out.shape == (*batch, 2, 50, 5)
    assert state.S.shape == (*batch, 2, 8, 5)
    assert state.tokens.shape == (*batch, 2)
    if out.numel():
        flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in (q, k, v, *gates.values())]
        expected, last = definition(DeltaRuleCall(*flat, scale=8**-0.5))
        close(out.reshape(expected.shape), expected)
        close(state.S.reshape(last.shape), last)


def test_tokens_without_heads():
    q, k, v, gates = tokens(T=20, heads=1)
    options = {"normalize_qk": True, "return_state": True}
    expected, last = linattn.delta_rule(q, k, v, **gates, **options)
    out, state = linattn.delta_rule(q[0], k[0], v[0], **{name: x[0] for name, x in gates.items()}, **options)
    close(out, expected[0])
    close(state.S, last.S)
    channels = gates["log_decay"][0].unsqueeze(-1).expand(20, 8)
    close(
        linattn.delta_rule(q[0], k[0], v[0], beta=gates["beta"][0], log_decay=channels, normalize_qk=True), expected[0]
    )


def test_arguments_broadcast():
    q, k, v, gates = tokens(3)
    decay = torch.tensor([-0.1, -0.2], dtype=torch.float64).reshape(1, 2, 1)
    out = linattn.delta_rule(q[:1], k, v, beta=gates["beta"][:1], log_decay=decay, key_mask=torch.ones(50).bool())
    same = {"beta": gates["beta"][:1].expand(3, 2, 50), "log_decay": decay.expand(3, 2, 50)}
    close(out, linattn.delta_rule(q[:1].expand(3, -1, -1, -1), k, v, **same))


@pytest.mark.parametrize("T", [0, 1])
def test_no_token_and_one(T):
    q, k, v, gates = tokens(2, T=5)
    _, state = linattn.delta_rule(q, k, v, **gates, return_state=True)
    q, k, v, gates = tokens(2, T=T, seed=1)
    out, after = linattn.delta_rule(q, k, v, **gates, state=state, return_state=True)
    expected, last = definition(DeltaRuleCall(q, k, v, *gates.values(), state=state.S, scale=8**-0.5))
    close(out, expected)
    close(after.S, last)
    assert (after.tokens == 5 + T).all()
    if not T:
        empty, _ = linattn.delta_rule(q, k, v, **gates, cu_seqlens=[0, 0, 0], return_state=True)
        assert empty.shape == (2, 2, 0, 5)


def test_masks_and_packing_count_their_tokens():
    q, k, v, gates = tokens(2)
    seen = torch.rand(2, 50, generator=torch.Generator().manual_seed(1)) > 0.4
    _, state = linattn.delta_rule(q, k, v, **gates, key_mask=seen, return_state=True)
    assert state.tokens.tolist() == [[n, n] for n in seen.sum(1).tolist()]
    options = {"cu_seqlens": torch.tensor([0, 7, 7, 50]), "normalize_qk": True}
    _out, state = linattn.delta_rule(q, k, v, **gates, key_mask=seen, **options, return_state=True)
    assert state.S.shape == (2, 3, 2, 8, 5)
    assert state.tokens[..., 0].tolist() == [[int(m[:7].sum()), 0, int(m[7:].sum())] for m in seen]
    again = linattn.delta_rule(q, k, v, **gates, key_mask=seen, **options, state=state)
    bounds = [0, 7, 7, 50]
    S = state.S.flatten(0, 1)
    expected, _ = definition(DeltaRuleCall(q, k, v, *gates.values(), seen, bounds, S, 8**-0.5, True))
    close(again, expected)


def test_autocast_changes_nothing():
    q, k, v, gates = tokens(2, dtype=torch.float32)
    expected = linattn.delta_rule(q, k, v, **gates, engine="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linattn.delta_rule(q, k, v, **gates, engine="torch"), expected)


def test_meta_tensors_have_shapes():
    q, k, v, gates = (x if isinstance(x, dict) else x.to("meta") for x in tokens(2, dtype=torch.bfloat16))
    gates = {name: x.to("meta") for name, x in gates.items()}
    out, state = linattn.delta_rule(q, k, v, **gates, return_state=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 2, 50, 5), torch.bfloat16, "meta")
    assert (state.S.shape, state.S.dtype) == ((2, 2, 8, 5), torch.float32)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler, of itself
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # the torch form, and the native one where it exists
def test_compile_has_no_graph_breaks(dtype):
    torch._dynamo.reset()
    q, k, v, gates = tokens(2, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call(state, *x):
        options = {"cu_seqlens": [0, 20, 50], "normalize_qk": True}
        return linattn.delta_rule(*x, **gates, **options, state=state, return_state=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    first = call(None, *leaves)[1].detach()
    (out, state), (expected, eager) = compiled(first, *leaves), call(first, *leaves)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    close(out, expected, tolerance)
    close(state.S, eager.S, tolerance)
    assert torch.equal(state.tokens, eager.tokens)
    for got, want in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)), strict=True):
        close(got, want, tolerance)


def test_a_state_is_a_state(tmp_path):
    q, k, v, gates = tokens(3)
    _out, state = linattn.delta_rule(q, k, v, **gates, return_state=True)
    assert isinstance(state, RecurrentState)
    state.save(tmp_path / "state.safetensors")
    assert State.load(tmp_path / "state.safetensors") == state == state.clone()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert "heads=2, dim=8, value_dim=5, tokens=50" in repr(state)
    picked = state.select([2, 0])
    rest = linattn.delta_rule(*(x[[2, 0]] for x in (q, k, v)), **{n: x[[2, 0]] for n, x in gates.items()}, state=picked)
    close(rest, linattn.delta_rule(q, k, v, **gates, state=state)[[2, 0]])
    before = state.S.clone()
    linattn.delta_rule(q, k, v, **gates, state=state)
    assert torch.equal(state.S, before)  # nothing is updated in place
    with pytest.raises(ValueError, match="the last 3 cannot be taken out of it"):
        state.drop_last(3)


def test_states_combine():
    """Each half from nothing, then the earlier one moved by the later one's transition."""
    q, k, v, gates = tokens(2)
    cuts = [[x[:, :, :20] for x in (q, k, v)], [x[:, :, 20:] for x in (q, k, v)]]
    gate_cuts = [{n: x[..., :20] for n, x in gates.items()}, {n: x[..., 20:] for n, x in gates.items()}]
    whole = linattn.delta_rule(q, k, v, **gates, normalize_qk=True, return_state=True)[1]
    first, second = (
        linattn.delta_rule(*cut, **gate, normalize_qk=True, return_state=True)[1]
        for cut, gate in zip(cuts, gate_cuts, strict=True)
    )
    _, moved = transition(DeltaRuleCall(*cuts[1], **gate_cuts[1], normalize_qk=True))
    both = first.combine(second, moved)
    close(both.S, whole.S)
    assert torch.equal(both.tokens, whole.tokens)
    with pytest.raises(ValueError, match="pass the transition matrix"):
        first.combine(second)
    for log_decay in (gates["log_decay"], gates["log_decay"].unsqueeze(-1) * torch.rand(8, dtype=torch.float64)):
        total = decayed_sums(q, k, v, log_decay=log_decay)[1]
        halves = [decayed_sums(*cut, log_decay=g)[1] for cut, g in zip(cuts, log_decay.split([20, 30], 2), strict=True)]
        close(halves[0].combine(halves[1], log_decay[:, :, 20:].sum(2).exp()).S, total.S)


def test_snapshots_roll_back():
    q, k, v, gates = tokens(1, T=30)
    snapshots: Snapshots[RecurrentState] = Snapshots(every=4, keep=3)
    states, state = [], None
    for t in range(30):
        cut, gate = [x[:, :, t : t + 1] for x in (q, k, v)], {n: x[..., t : t + 1] for n, x in gates.items()}
        _, state = linattn.delta_rule(*cut, **gate, normalize_qk=True, state=state, return_state=True)
        states.append(state)
        snapshots.record(state, t + 1)
    assert snapshots.positions == [21, 25, 29]
    state, first = snapshots.roll_back(28)
    assert first == 25
    cut, gate = [x[:, :, first:28] for x in (q, k, v)], {n: x[..., first:28] for n, x in gates.items()}
    _, replayed = linattn.delta_rule(*cut, **gate, normalize_qk=True, state=state, return_state=True)
    close(replayed.S, states[27].S)
    assert snapshots.positions == [21, 25]
    assert snapshots.nbytes == 2 * state.nbytes
    with pytest.raises(ValueError, match="no copy at or before 20 tokens"):
        snapshots.roll_back(20)


q, k, v, gates = tokens(2, T=6)
BAD = [
    ({"beta": None}, TypeError, "beta must be a floating-point tensor"),
    ({"beta": gates["beta"][:, :1, :3]}, ValueError, r"beta must be \(..., value heads, tokens\) = \(2, 2, 6\)"),
    ({"log_decay": -gates["log_decay"]}, ValueError, "log_decay must not be NaN or above 0"),
    ({"log_decay": gates["log_decay"] * torch.nan}, ValueError, "log_decay must not be NaN or above 0"),
    ({"log_decay": gates["log_decay"][..., :2]}, ValueError, r"log_decay must be .* = \(2, 2, 6\), got \(2, 2, 2\)"),
    ({"key": k[..., :7]}, ValueError, "query and key must have the same dim, got 8 and 7"),
    ({"key": k[:, :, :5]}, ValueError, "must have the same number of tokens"),
    ({"key": k.float()}, TypeError, "must have one dtype"),
    ({"value": v[:, :1]}, ValueError, "pass enable_gqa=True"),
    ({"value": v[:, :1], "enable_gqa": True}, ValueError, "value heads must be a multiple of key heads, got 1 and 2"),
    ({"query": None}, TypeError, "query must be a tensor, got NoneType"),
    ({"query": q[0, 0, 0, 0]}, ValueError, r"query must be \(..., heads, tokens, dim\) or \(tokens, dim\)"),
    ({"query": q[..., :0], "key": k[..., :0]}, ValueError, "at least one coordinate"),
    ({"query": q.long()}, TypeError, "query must be floating point"),
    ({"scale": -1.0}, ValueError, "scale must be a positive number"),
    ({"key_mask": torch.ones(2, 5).bool()}, ValueError, r"key_mask must be \(batch, tokens\) = \(2, 6\)"),
    ({"key_mask": torch.ones(2, 6)}, TypeError, "key_mask must be a bool tensor"),
    ({"cu_seqlens": [0, 5]}, ValueError, "cu_seqlens must rise from 0"),
    ({"cu_seqlens": ([0, 6], [0, 3, 6])}, ValueError, "cu_seqlens"),
    ({"state": {}}, TypeError, "state must come from an earlier call of delta_rule"),
    ({"state": decayed_sums(q, k, v)[1]}, ValueError, "one made by decayed_sums"),
    ({"state": RecurrentState.empty("delta_rule", (2,), 2, 8, 4)}, ValueError, r"the call needs \(2, 2, 8, 5\)"),
    ({"engine": "fast"}, ValueError, "unknown engine 'fast'"),
    ({"engine": "native"}, ValueError, "cannot serve this call"),  # float64
    ({"key": k * torch.inf}, ValueError, "key must be finite"),
    ({"key": 1e200 * k}, ValueError, "pass normalize_qk=True"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_one_clear_error(change, kind, message):
    options = {"query": q, "key": k, "value": v, **gates, **change}
    with pytest.raises(kind, match=message):
        linattn.delta_rule(options.pop("query"), options.pop("key"), options.pop("value"), **options)


def test_a_log_decay_of_minus_infinity_forgets_everything():
    q, k, v, gates = tokens(1, T=10)
    cut = torch.zeros_like(gates["log_decay"])
    cut[..., 4] = -torch.inf
    out = linattn.delta_rule(q, k, v, beta=gates["beta"], log_decay=cut, normalize_qk=True)
    rest = [x[:, :, 4:] for x in (q, k, v)]
    close(out[:, :, 4:], linattn.delta_rule(*rest, beta=gates["beta"][..., 4:], normalize_qk=True))


HEADS = [(2, 2, 2), (1, 1, 3), (2, 1, 2), (1, 2, 4), (6, 1, 3), (4, 2, 2)]
case = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(["delta", "sums"]),
        "lengths": st.lists(st.integers(0, 70), min_size=1, max_size=4),
        "decay": st.sampled_from(["none", "head", "channel"]),
        "heads": st.sampled_from(HEADS),
        "mask": st.booleans(),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "engine": st.sampled_from(["auto", "torch"]),
        "seed": st.integers(0, 1000),
        "cut": st.floats(0, 1),
    }
)


@settings(max_examples=40, deadline=None)
@given(case)
def test_random_calls_equal_the_definition(case):
    """In one call, and cut in two with the state passed on; packed if there are several sequences."""
    bounds = [0, *torch.tensor(case["lengths"]).cumsum(0).tolist()]
    packed = bounds if len(bounds) > 2 else None
    wide = torch.float64 if case["dtype"] == torch.float64 else torch.float32
    inputs = make(
        case["rule"], bounds[-1], case["decay"], heads=case["heads"], mask=case["mask"], seed=case["seed"],
        bounds=packed, dtype=wide,
    )  # fmt: skip
    narrow = [x.to(case["dtype"]) for x in (inputs.query, inputs.key, inputs.value)]
    options = {"enable_gqa": True, "scale": 0.3, "engine": case["engine"]}

    def call(tokens, beta, g, mask, **more):
        if beta is None:
            return decayed_sums(*tokens, log_decay=g, key_mask=mask, **options, **more)
        more |= {"beta": beta, "normalize_qk": True, "return_state": True}
        return linattn.delta_rule(*tokens, log_decay=g, key_mask=mask, **options, **more)

    double = [x.double() for x in narrow]
    gates = [None if x is None else x.double() for x in (inputs.beta, inputs.log_decay)]
    if inputs.beta is None:
        expected, last = sums_definition(DecayedSumsCall(*double, gates[1], inputs.mask, packed, None, 0.3))
    else:
        expected, last = definition(DeltaRuleCall(*double, *gates, inputs.mask, packed, None, 0.3, True))
    out, state = call(narrow, inputs.beta, inputs.log_decay, inputs.mask, cu_seqlens=packed)
    tolerance = TOLERANCE[case["dtype"]]
    close(out, expected, tolerance)
    close(state.S.reshape(last.shape), last, max(1e-8, min(tolerance, 3e-4)))
    if packed is None:
        cut = round(case["cut"] * bounds[-1])
        rows, state = [], None
        for part in (slice(0, cut), slice(cut, None)):
            pieces = [None if x is None else x[:, :, part] for x in (inputs.beta, inputs.log_decay)]
            mask = None if inputs.mask is None else inputs.mask[:, part]
            row, state = call([x[:, :, part] for x in narrow], *pieces, mask, state=state)
            rows.append(row)
        close(torch.cat(rows, 2), expected, tolerance)
