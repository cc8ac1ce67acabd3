"""Decay, gates and masks together: every way to compute a row is its definition, in both engines, gradients included.

The guard of the denominators may act only where a denominator is small beside the largest weight that its row sees, and
a row that sees one key is that key's value, whatever was hidden or forgotten since.

Calls go through linattn.attention, where a hidden token does not decay, and straight to an engine, where it does.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import linattn
from decay_support import DIM, KERNELS, VALUE_DIM, Case, Engine, Forget, cases, engine, engines, names, several
from linattn.engines import Call, torch_engine
from linattn.ops.linear_attention import reference as oracle
from linattn.states import LinearState
from native_support import needs_native, tokens

__all__ = ["engine"]


# The weight (q.k + 1)^2 of the only key is a square of nearly 0.
CANCELLED = Case("polynomial", 100, 0.0, Forget("decay", False), 0.5, 1, 0.0, [], seed=188588)


@engines
@given(case=cases())
@example(case=CANCELLED)
@several
def test_any_split_is_the_definition(engine, case):
    """Outputs, tokens and guarded rows of the whole call, of any cuts, and, if it is short, of single tokens."""
    expected, size, cancelled = case.definition()
    allowed, bits = (1e-9, 790) if engine.exact else (1e-5, 90)
    divided, zero = size > 2.0**-bits, size < 2.0 ** (-bits - 60)  # between them either is right
    divided &= allowed * cancelled < 1  # terms that cancel leave no digit of their sum: either is right
    blind = (case.mask.cumsum(-1) == 0).sum() * case.groups
    least, most = (x.reshape(1, 2, -1).sum(-1) - blind for x in (zero, ~divided))
    top = expected.abs().max().clamp_min(1e-3)
    for cuts in ([], case.cuts, *([list(range(1, case.length))] if case.length <= 100 else [])):
        with torch.no_grad():
            rows, state = case.run(engine, case.inputs(engine.dtype), cuts, case.log)
        error = (rows.double() - expected).abs().amax(-1) / top
        assert (error[divided] <= (allowed * cancelled)[divided]).all(), f"{error[divided].max():.3g} off"
        assert not rows[zero].any()
        assert ((least <= state.guarded) & (state.guarded <= most)).all()
        assert state.tokens.tolist() == [[int(case.mask.sum())] * 2]


@engines
@given(case=cases(longest=150))
@several
def test_gradients_are_those_of_the_definition(engine, case):
    _, size, cancelled = case.definition()
    weight = tokens(1, 2 * case.groups, case.length, VALUE_DIM, seed=case.seed + 5)
    weight = weight * ((size > 0.05) & (cancelled < 30)).unsqueeze(-1)  # others have gradients of any size

    def gradients(dtype, attend):
        leaves = [x.requires_grad_() for x in (*case.inputs(dtype), case.log)]
        out = attend(leaves[:3], leaves[3])[0]
        return torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves, allow_unused=True)

    expected = gradients(torch.float64, lambda x, log: case.forget.definition(case.kernel, x, case.mask, log))
    top = max(1e-2, *(x.abs().max().item() for x in expected if x is not None))
    for cuts in ([], case.cuts):
        got = gradients(engine.dtype, lambda x, log, cuts=cuts: case.run(engine, x, cuts, log))
        for x, y in zip(got, expected, strict=False):
            if x is not None and y is not None:
                assert (x.double() - y).abs().max().item() <= (1e-8 if engine.exact else 2e-4) * top
            else:
                assert case.forget.form == ""


@engines
@given(case=cases(), at=st.floats(0, 1), factor=st.sampled_from([0.0, 1.0, 30.0]), large=st.booleans())
@several
def test_later_tokens_change_no_earlier_row(engine, case, at, factor, large):
    """To the bit: other keys, values, queries, masks and decay from a token on."""
    inputs, mask, log = case.inputs(engine.dtype), case.mask, case.log
    if large:  # exponents that the native engine must bring into range, row by row
        inputs[0] = inputs[0] * 12
    at = int(at * (case.length - 1)) + 1
    with torch.no_grad():
        before, _ = case.forget.attend(engine, case.kernel, inputs, None, mask, log)
        changed = [x.clone() for x in inputs]
        changed[0][:, :, at:] *= factor
        changed[1][:, :, at:] *= factor
        changed[2][:, :, at:] += 7
        mask = torch.cat([mask[:, :at], ~mask[:, at:]], 1)
        log = torch.cat([log[..., :at], log[..., at:] * 0.5], -1)
        after, _ = case.forget.attend(engine, case.kernel, changed, None, mask, log)
    assert torch.equal(after[:, :, :at], before[:, :, :at])


@engines
@given(case=cases(longest=100), left=st.integers(0, 100), right=st.integers(0, 100))
@several
def test_padding_changes_nothing(engine, case, left, right):
    """Hidden tokens before and after, of any decay, and hidden ones in between that do not decay."""
    inputs, cancelled = case.inputs(engine.dtype), case.definition()[2]
    whole, state = case.run(engine, inputs, [], case.log)
    spots = torch.arange(case.length) + torch.arange(case.length) // 5 + left
    length = int(spots[-1]) + 1 + right
    padded = [torch.full((*x.shape[:2], length, x.shape[3]), 3.0, dtype=x.dtype) for x in inputs]
    for x, y in zip(padded, inputs, strict=False):
        x[:, :, spots] = y
    mask = torch.zeros(1, length, dtype=torch.bool)
    log = torch.full((1, 2, length), -1e-300, dtype=torch.float64)
    log[..., :left], log[..., length - right :] = -2.0, -3.0
    mask[:, spots], log[..., spots] = case.mask, case.log
    out, after = case.forget.attend(engine, case.kernel, padded, None, mask, log)
    error = (out[:, :, spots] - whole).abs().amax(-1) / whole.abs().max().clamp_min(1e-3)
    assert (error[cancelled < 30] <= (1e-9 if engine.exact else 1e-4)).all()
    assert torch.equal(after.tokens, state.tokens)


FORGOTTEN = {"slowly": -0.7, "at once": -690.0, "beyond any float": -1e4}


@engines
@names
@pytest.mark.parametrize("log", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_row_that_sees_one_key_is_its_value(engine, name, log):
    """However long ago it was: in whole calls, in steps, in training, and read by a full call."""
    N, at, kernel, forget = 400, 3, KERNELS[name], Forget("decay", direct=True)
    q, k, v = (
        x.to(engine.dtype) for x in (tokens(1, 1, N, DIM), tokens(1, 1, N, DIM, seed=1), tokens(1, 1, N, 4, seed=2))
    )
    q = (
        q.abs() + 0.1 if name == "relu" else k[:, :, at : at + 1].expand(-1, -1, N, -1) + 0.1 * q
    )  # no denominator near 0
    k = k.abs() if name == "relu" else k
    mask, log = (torch.arange(N) == at).unsqueeze(0), torch.full((1, 1, N), log, dtype=torch.float64)
    near = {"rtol": 0, "atol": 1e-10 if engine.exact else 2e-5}
    expected = v[:, :, at : at + 1]

    rows, state = forget.attend(engine, kernel, [q, k, v], None, mask, log)
    torch.testing.assert_close(rows[:, :, at:], expected.expand(-1, -1, N - at, -1), **near)
    assert not rows[:, :, :at].any()
    assert state.guarded.item() == 0

    one = [x[:, :, -1:] for x in (q, k, v)]
    for form in ("", "decay"):  # one hidden token more, in a call that forgets and in one that does not
        row, later = Forget(form, direct=True).attend(engine, kernel, one, state, mask[:, -1:], log[..., -1:])
        torch.testing.assert_close(row, expected, **near)
        assert (later.tokens.item(), later.guarded.item()) == (1, 0)
    more = {"kernel": kernel, "engine": engine.name, "key_mask": mask[:, 300:], "state": state}
    full = linattn.attention(*(x[:, :, 300:] for x in (q, k, v)), **more)
    torch.testing.assert_close(full, expected.expand(-1, -1, 100, -1), **near)

    value = v.clone().requires_grad_()
    trained, _ = forget.attend(engine, kernel, [q, k, value], None, mask, log)
    (grad,) = torch.autograd.grad(trained.sum(), value)
    assert abs(grad[0, 0, at, 0].item() / (N - at) - 1) < 1e-4
    assert not grad[:, :, at + 1 :].any()


@engines
@names
def test_decay_of_any_strength_starts_anew(engine, name):
    """Even where logarithms of such decay, added up, would swallow those of the tokens after it."""
    N, at = 120, 70
    q, k, v = (tokens(1, 1, N, DIM, seed=s).to(engine.dtype) for s in range(3))
    log = torch.full((1, 1, N), -0.3, dtype=torch.float64)
    options = {"kernel": KERNELS[name], "is_causal": True, "engine": engine.name}
    alone = linattn.attention(*(x[:, :, at:] for x in (q, k, v)), log_decay=log[..., at:], **options)
    for strength in (-1e4, -1e30, torch.finfo(torch.float32).min):
        log[..., at] = strength
        rows = linattn.attention(q, k, v, log_decay=log, **options)
        assert (rows[:, :, at:] - alone).abs().max() <= (1e-8 if engine.exact else 1e-4) * alone.abs().max()


@engines
def test_a_hidden_step_leaves_the_sums_as_they_are(engine):
    """Without decay to the bit: scales of whole bits are exact, however many steps there are."""
    for name in ("elu", "positive"):
        options = {"kernel": KERNELS[name], "is_causal": True, "engine": engine.name, "return_state": True}
        x = tokens(1, 2, 5, DIM).to(engine.dtype)
        _, first = linattn.attention(x, x, x, **options)
        state, one, hidden = first, x[:, :, :1], torch.zeros(1, 1, dtype=torch.bool)
        for _ in range(5):
            _, state = linattn.attention(one, one, one, key_mask=hidden, state=state, **options)
        assert torch.equal(state.S, first.S)
        assert torch.equal(state.log_scale, first.log_scale)


def assert_near(got: list[Tensor], expected: list[Tensor]) -> None:
    """Within 2e-5 of the largest number of all: gradients of queries may be 0 where a row sees one key."""
    top = max(x.abs().max().item() for x in expected)
    for x, y in zip(got, expected, strict=False):
        assert (x.double() - y).abs().max().item() <= 2e-5 * top


@engines
def test_queries_after_hidden_keys_that_decay(engine):
    """Keys added before any row, most of them hidden, decay by more than a float32 scale tells apart."""
    N, L, kernel = 700, 20, KERNELS["positive"]
    q, k, v = tokens(1, 2, L, DIM), tokens(1, 2, N, DIM, seed=1), tokens(1, 2, N, VALUE_DIM, seed=2)
    mask = (torch.arange(N) < 5).unsqueeze(0)
    for strength in (0.5, 50.0, 99731.7):
        log = -strength * torch.rand(1, 2, N, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        grads = []
        for dtype in (engine.dtype, torch.float64):
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            module = engine.module if not grads else torch_engine
            state = LinearState.empty(kernel.signature(), (1,), 2, 16, VALUE_DIM, dtype=dtype)
            call = Call(kernel, None, kernel.signature(), key_mask=mask, log_decay=log)
            out, _ = module.read_state(call, leaves[0], module.update_state(call, *leaves[1:], state))
            grads.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert_near(*grads)
        alone = oracle.attention(*(x.double() for x in (q, k[:, :, :5], v[:, :, :5])), kernel, log_decay=log[..., :5])
        assert (grads[0][0] - alone).abs().max() <= 2e-5 * alone.abs().max()


@needs_native
def test_threads_that_share_a_head_keep_its_scales_in_training():
    """Hidden tokens decay it by millions of bits, where float32 has no fractions of one."""
    N, before, grads = 1600, torch.get_num_threads(), []
    inputs = tokens(1, 1, N, DIM), tokens(1, 1, N, DIM, seed=1), tokens(1, 1, N, VALUE_DIM, seed=2)
    mask, log = (torch.arange(N) % 700 < 2).unsqueeze(0), torch.full((1, 1, N), -98765.4321, dtype=torch.float64)
    try:
        torch.set_num_threads(3)
        for engine in (Engine("native", torch.float32), Engine("torch", torch.float64)):
            leaves = [x.to(engine.dtype).requires_grad_() for x in inputs]
            out, _ = Forget("decay", direct=True).attend(engine, KERNELS["elu"], leaves, None, mask, log)
            grads.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.set_num_threads(before)
    assert_near(*grads)
