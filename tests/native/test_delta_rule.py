"""The native delta rule against its step-by-step definition in float64: outputs, states and every gradient."""

import itertools

import pytest
import torch
from torch import Tensor

from linattn.engines.native import delta_rule as native
from linattn.engines.native.ffi import library
from linattn.ops.delta_rule.call import DeltaRuleCall
from native_support import isa, needs_native  # noqa: F401

pytestmark = needs_native
NAMES = ["query", "key", "value", "beta", "log_decay", "state"]
KINDS = ["plain", "head", "channel"]


def definition(call):
    """One token after the other, in the inputs' dtype."""
    query, key, value, beta, log_decay, mask, cu_seqlens, state, scale, normalize_qk = call
    T, H = value.shape[2], value.shape[1]
    Ho = max(query.shape[1], H)
    if mask is not None:
        hidden = ~mask[:, None, :]
        key, value = (x.masked_fill(hidden[..., None], 0) for x in (key, value))
        beta = beta.masked_fill(hidden, 0)
        if log_decay is not None:
            log_decay = log_decay.masked_fill(hidden if log_decay.dim() == 3 else hidden[..., None], 0)
    if normalize_qk:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = query.repeat_interleave(Ho // query.shape[1], 1), key.repeat_interleave(H // key.shape[1], 1)
    bounds = [0, T] if cu_seqlens is None else cu_seqlens
    shape = value.shape[0], len(bounds) - 1, H, key.shape[3], value.shape[3]
    states = list((value.new_zeros(shape) if state is None else state.view(shape)).unbind(1))
    rows = []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        S = states[i]
        for t in range(begin, end):
            if log_decay is not None:
                a = log_decay[:, :, t].exp()
                S = S * (a[..., None, None] if a.dim() == 2 else a[..., None])
            k = key[:, :, t]
            error = value[:, :, t] - (k[..., None] * S).sum(-2)
            S = S + k[..., None] * (beta[:, :, t, None] * error)[..., None, :]
            rows.append(scale * (query[:, :, t, :, None] * S.repeat_interleave(Ho // H, 1)).sum(-2))
        states[i] = S
    out = torch.stack(rows, 2) if rows else value.new_zeros(value.shape[0], Ho, 0, value.shape[3])
    return out, torch.stack(states, 1).flatten(0, 1)


def draw(T, kind="head", heads=(2, 2, 2), dims=(16, 16), *, B=2, n=1, strength=1.0, seed=0, dtype=torch.float32):
    """query, key, value, beta, log_decay and state; beta up to 2."""
    torch.manual_seed(seed)
    (Hq, Hk, H), (D, M) = heads, dims
    query, key, value = torch.randn(B, Hq, T, D), torch.randn(B, Hk, T, D), torch.randn(B, H, T, M)
    decay = {"plain": None, "head": torch.rand(B, H, T), "channel": torch.rand(B, H, T, D)}[kind]
    tokens = [x.to(dtype) for x in (query, key, value)]
    decays = None if decay is None else -strength * decay
    return [*tokens, 2 * torch.rand(B, H, T), decays, torch.randn(B * n, H, D, M)]


def run(rule, inputs, mask=None, cu_seqlens=None, *, scale=0.3, normalize_qk=True):
    *tokens, state = inputs
    return rule(DeltaRuleCall(*tokens, mask, cu_seqlens, state, scale, normalize_qk))


def doubled(inputs):
    return [None if x is None else x.double() for x in inputs]


def close(name: str, mine: Tensor, truth: Tensor, tolerance: float) -> None:
    assert mine.shape == truth.shape, name
    if truth.numel():
        error = (mine.double() - truth.double()).abs().max() / truth.abs().max().clamp(min=1e-30)
        assert error < tolerance, f"{name}: {error:.1e}"


def check(inputs, mask=None, cu_seqlens=None, *, tolerance=2e-5, **options):
    """Outputs, final states and gradients of everything, for a random gradient of both."""
    mine = [None if x is None else x.clone().requires_grad_() for x in inputs]
    true = [None if x is None else x.double().requires_grad_() for x in inputs]
    results = run(native.delta_rule, mine, mask, cu_seqlens, **options)
    truths = run(definition, true, mask, cu_seqlens, **options)
    weights = [torch.randn(x.shape) for x in truths]
    for name, a, b in zip(("out", "final"), results, truths, strict=True):
        close(name, a, b, tolerance)
    with torch.no_grad():  # the call without gradients goes another way
        for a, b in zip(run(native.delta_rule, inputs, mask, cu_seqlens, **options), truths, strict=True):
            close("without gradients", a, b, tolerance)
    for outputs in (results, truths):
        sum((x.double() * w).sum() for x, w in zip(outputs, weights, strict=True)).backward()
    for name, a, b in zip(NAMES, mine, true, strict=True):
        if a is not None:
            close(f"gradient of {name}", a.grad, torch.zeros_like(b) if b.grad is None else b.grad, tolerance)
    return [None if x is None else x.grad for x in mine]


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_and_shapes_on_every_instruction_set(isa, kind):  # noqa: F811
    for T, heads, dims in [
        (1, (2, 2, 2), (16, 16)),
        (2, (1, 1, 1), (3, 1)),
        (31, (4, 2, 2), (20, 33)),
        (63, (1, 1, 2), (48, 80)),
        (64, (2, 1, 2), (128, 16)),
        (65, (1, 1, 1), (33, 130)),
        (200, (1, 2, 2), (7, 5)),
    ]:
        check(draw(T, kind, heads, dims, B=1))


@pytest.mark.parametrize("kind", KINDS)
def test_as_given_without_normalization(kind):
    for T, scale in ((1, 1.0), (70, 1.0), (5, 0.0)):
        inputs = draw(T, kind, dims=(1, 3))
        inputs[3] = inputs[3] / inputs[1].square().sum(-1).clamp(min=1)
        check(inputs, normalize_qk=False, scale=scale)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_and_segments(kind):
    check(draw(1100, kind, (1, 1, 1), (8, 8), B=1, strength=0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_have_no_effect_whatever_they_hold(kind):
    inputs = draw(150, kind)
    mask = torch.rand(2, 150) > 0.4
    dirty = [x if x is None else x.clone() for x in inputs]
    for x in dirty[1:5]:
        if x is not None:
            x[~mask[:, None].expand(*x.shape[:3])] = float("nan")
    grads = check(inputs, mask)
    assert torch.equal(run(native.delta_rule, dirty, mask)[0], run(native.delta_rule, inputs, mask)[0])
    leaves = [None if x is None else x.requires_grad_() for x in dirty]
    out, _ = run(native.delta_rule, leaves, mask)
    out.sum().backward()
    for grad, x in zip(grads[1:5], leaves[1:5], strict=True):
        if x is not None:
            assert (x.grad[~mask[:, None].expand(*x.shape[:3])] == 0).all()
            assert (grad[~mask[:, None].expand(*x.shape[:3])] == 0).all()
            assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind):
    check(draw(700, kind, (1, 1, 1), (8, 8), n=4, B=2), cu_seqlens=[0, 3, 3, 70, 700])


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_is_one_call(kind):
    inputs = draw(300, kind, (2, 2, 2), (32, 48))
    out, final = run(native.delta_rule, inputs)
    *tokens, state = inputs
    for cuts in ([0, 1, 2, 65, 193, 300], list(range(301))):
        rows, S = [], state
        for a, b in itertools.pairwise(cuts):
            part = [None if x is None else x[:, :, a:b] for x in tokens]
            row, S = run(native.delta_rule, [*part, S])
            rows.append(row)
        close("out", torch.cat(rows, 2), out, 1e-5)
        close("final", S, final, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_nothing_to_the_bit(isa, kind):  # noqa: F811
    inputs = draw(150, kind)
    out, _ = run(native.delta_rule, inputs)
    for cut in (37, 64, 101):
        for poison in (3.0, float("nan"), float("inf")):
            changed = [x if x is None else x.clone() for x in inputs]
            for x in changed[:5]:
                if x is not None:
                    x[:, :, cut:] = -1.0 if x is changed[4] and poison == 3.0 else poison
            assert torch.equal(run(native.delta_rule, changed)[0][:, :, :cut], out[:, :, :cut])


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_strong_and_absent_decays(kind):
    inputs = draw(140, kind, strength=0.0)
    inputs[4][:, :, ::3] = -20.0
    check(inputs)
    inputs[4][:] = -20.0  # gradients of log decays are of the size of exp(-20)
    check(inputs, tolerance=3e-4)
    inputs[4][:, :, 70] = -10_000.0
    inputs[4][:, :, 71:] = -0.01
    check(inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_without_decay_or_writes_a_state_keeps_its_bits(kind):
    inputs = draw(1000, kind, strength=0.0)
    inputs[3][:] = 0
    for _ in range(3):
        final = run(native.delta_rule, inputs)[1]
        assert torch.equal(final, inputs[5])
    one = [x if x is None else x[:, :, :1] for x in inputs[:5]]
    assert torch.equal(run(native.delta_rule, [*one, inputs[5]])[1], inputs[5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
def test_key_norms(kind, norm):
    inputs = draw(130, kind, (1, 1, 1), (16, 16))
    key = inputs[1]
    inputs[1] = key / key.norm(dim=-1, keepdim=True) * norm
    inputs[3] = inputs[3] / norm**2
    check(inputs, normalize_qk=False, tolerance=3e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_widened(kind, dtype):
    inputs = draw(100, kind, dtype=dtype)
    rounding = 1e-3 if dtype is torch.float16 else 8e-3
    check(inputs, tolerance=rounding)
    assert run(native.delta_rule, inputs)[0].dtype is dtype
    final = run(native.delta_rule, inputs)[1]
    wide = [x if x is None else x.float() for x in inputs]
    assert final.dtype is torch.float32
    assert torch.equal(final, run(native.delta_rule, wide)[1])
    one = [x if x is None else x[:, :, :1] for x in inputs[:5]]
    one.append(inputs[5])
    close("one token", run(native.delta_rule, one)[0], run(definition, doubled(one))[0], rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs(kind):
    inputs = draw(90, kind, dims=(16, 24))
    out, final = run(native.delta_rule, inputs)
    turned = [None if x is None else x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:5]]
    grads = check([*turned, inputs[5].mT.contiguous().mT])
    again = run(native.delta_rule, [*turned, inputs[5]])
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], final)
    assert all(g is None or g.isfinite().all() for g in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_in_place_equals_decode(isa, kind):  # noqa: F811
    for heads, dims in [((2, 2, 2), (16, 16)), ((4, 1, 2), (20, 150)), ((1, 1, 4), (128, 128))]:
        inputs = draw(1, kind, heads, dims, B=3)
        *tokens, state = inputs
        mask = torch.tensor([[True], [False], [True]])
        for given in (None, mask):
            true = run(definition, doubled(inputs), given)
            out, final = native.decode(DeltaRuleCall(*tokens, given, None, state, 0.3, True))
            close("out", out, true[0], 1e-5)
            close("final", final, true[1], 1e-5)
            same = state.clone()
            again, kept = native.decode(DeltaRuleCall(*tokens, given, None, same, 0.3, True), out_state=same)
            assert kept is same
            assert torch.equal(same, final)
            assert torch.equal(again, out)
        fresh, _ = native.decode(DeltaRuleCall(*tokens, scale=0.3, normalize_qk=True))
        close("no state", fresh, run(definition, doubled([*tokens, torch.zeros_like(state)]))[0], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_heads_by_value_columns(kind):
    inputs = draw(130, kind, (1, 1, 1), (16, 144), B=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(native.delta_rule, inputs)
        torch.set_num_threads(3)
        shared = run(native.delta_rule, inputs)
        check(inputs)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(alone, shared, strict=True):
        close("threads", a, b, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(0, 2, 5, 4, 4), (2, 2, 0, 4, 4), (1, 1, 3, 0, 4), (1, 1, 3, 4, 0)])
def test_empty_sizes(kind, sizes):
    B, H, T, D, M = sizes
    check(draw(T, kind, (H, H, H), (D, M), B=B))


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_and_one_gradient_missing(kind):
    from linattn.engines.native import delta_rule_autograd as operators

    inputs = [None if x is None else x.requires_grad_() for x in draw(40, kind, dims=(8, 8), B=1, n=2)]
    *tokens, state = inputs
    mask = torch.rand(1, 40) > 0.2
    torch.library.opcheck(operators.forward, (*tokens, mask, [0, 7, 40], state, 0.5, True, True))
    torch.library.opcheck(operators.forward, (*tokens, None, [0, 7, 40], None, 0.5, False, False))
    _, final = native.delta_rule(DeltaRuleCall(*tokens, None, [0, 7, 40], None, 0.5, True))
    grads = torch.autograd.grad(final.sum(), [tokens[1], tokens[2], tokens[3]])
    assert all(g.isfinite().all() for g in grads)


def test_compile_sees_one_node():
    graphs = []

    def record(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=record, fullgraph=True)
    def compiled(*tokens):
        return native.delta_rule(DeltaRuleCall(*tokens, scale=0.5, normalize_qk=True))[0] * 2

    inputs = draw(20)
    out = compiled(*inputs[:5])
    close("compiled", out, 2 * native.delta_rule(DeltaRuleCall(*inputs[:5], scale=0.5, normalize_qk=True))[0], 1e-6)
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("linattn.delta_rule" in name for name in calls) == 1


def test_second_derivatives_are_refused():
    inputs = [x.requires_grad_() for x in draw(10)]
    out, _ = run(native.delta_rule, inputs)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        grad.sum().backward()


def test_a_long_sequence_keeps_its_scale():
    """A key and value that repeat are read back exactly, however many tokens there were."""
    T = 200_000
    key = torch.zeros(1, 1, 1, 4)
    key[..., 0] = 1
    value = torch.tensor([1.0, -2.0, 3.0, 0.5]).view(1, 1, 1, 4)
    key, value = key.expand(1, 1, T, 4), value.expand(1, 1, T, 4)
    beta, decay = torch.full((1, 1, T), 0.5), torch.full((1, 1, T), -1e-6)
    for log_decay in (None, decay, decay.unsqueeze(-1).expand(1, 1, T, 4)):
        out, _ = native.delta_rule(DeltaRuleCall(key, key, value, beta, log_decay))
        close("last rows", out[:, :, -5:], value[:, :, -5:], 1e-5)
    state = torch.ones(1, 1, 4, 4)
    silent = torch.zeros(1, 1, T)
    for log_decay in (decay, decay.unsqueeze(-1).expand(1, 1, T, 4)):
        _, final = native.delta_rule(DeltaRuleCall(key, key, value, silent, log_decay, state=state))
        close("what is left", final, state.double() * torch.tensor(-1e-6, dtype=torch.float64).mul(T).exp(), 1e-4)


def test_the_library_has_the_rule():
    assert native.available() is (library.why_not is None)
