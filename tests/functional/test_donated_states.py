"""donate_state: one token at a time, with the new state in the old one's memory."""

import pytest
import torch
from torch.autograd import forward_ad as fwAD

import linattn
from linattn.engines import native

native_only = pytest.mark.skipif(not native.available(), reason="the native engine is not available")


def tokens(T, dtype=torch.float32, query_heads=4, key_heads=4, channels=False):
    generator = torch.Generator().manual_seed(T)
    q = torch.randn(2, query_heads, T, 24, generator=generator).to(dtype)
    k = torch.nn.functional.normalize(torch.randn(2, key_heads, T, 24, generator=generator), dim=-1).to(dtype)
    v = torch.randn(2, 4, T, 40, generator=generator).to(dtype)
    decay = -torch.rand(2, 4, T, *([24] if channels else []), generator=generator)
    return q, k, v, torch.rand(2, 4, T, generator=generator), decay


def delta(q, k, v, beta, decay, **options):
    return linattn.delta_rule(q, k, v, beta=beta, log_decay=decay, enable_gqa=True, return_state=True, **options)


def sums(q, k, v, _beta, decay, **options):
    identity = {"kernel": "identity", "normalize": False, "is_causal": True, "enable_gqa": True, "return_state": True}
    return linattn.attention(q, k, v, log_decay=decay, **identity, **options)


CALLS = [
    pytest.param(delta, {}, id="delta"),
    pytest.param(delta, {"query_heads": 8, "key_heads": 2}, id="delta shared heads"),
    pytest.param(delta, {"channels": True}, id="delta channels"),
    pytest.param(sums, {}, id="sums"),
    pytest.param(sums, {"query_heads": 8, "channels": True}, id="sums shared heads channels"),
]


def one(given, t):
    return [x[:, :, t : t + 1] for x in given]


@pytest.mark.parametrize("engine", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("call", "shape"), CALLS)
def test_donated_steps_equal_one_call(call, shape, dtype, engine):
    given = tokens(9, dtype, **shape)
    whole, last = call(*given, engine=engine)
    out, state = call(*one(given, 0), engine=engine)
    rows = [out]
    for t in range(1, 9):
        out, state = call(*one(given, t), state=state, donate_state=True, engine=engine)
        rows.append(out)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(torch.cat(rows, 2), whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.S, last.S, rtol=1e-5, atol=1e-5)
    assert state.tokens.eq(9).all()


@native_only
@pytest.mark.parametrize(("call", "shape"), CALLS)
def test_the_memory_is_reused_if_donated_and_only_then(call, shape):
    given = tokens(2, **shape)
    _, state = call(*one(given, 0))
    before = state.S.clone()
    _, fresh = call(*one(given, 1), state=state)
    assert fresh.S.data_ptr() != state.S.data_ptr()
    assert torch.equal(state.S, before)
    _, donated = call(*one(given, 1), state=state, donate_state=True)
    assert donated.S.data_ptr() == state.S.data_ptr()
    assert torch.equal(donated.S, fresh.S)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(("call", "shape"), CALLS)
def test_bad_numbers_are_an_error_and_lose_nothing(call, shape, place):
    if call is sums and place == 3:
        return  # no beta
    given = tokens(2, **shape)
    _, state = call(*one(given, 0))
    before = state.S.clone()
    bad = [x.clone() for x in one(given, 1)]
    bad[place].view(-1)[3] = float("nan")
    with pytest.raises(ValueError, match=("query", "key", "value", "beta", "log_decay")[place]):
        call(*bad, state=state, donate_state=True)
    assert torch.equal(state.S, before)
    bad[place] = one(given, 1)[place]
    bad[4] = bad[4] * 0 + 0.5
    with pytest.raises(ValueError, match="log_decay"):
        call(*bad, state=state, donate_state=True)
    assert torch.equal(state.S, before)


@native_only
@pytest.mark.parametrize(("call", "shape"), CALLS)
def test_a_donated_state_that_overflows_is_an_error(call, shape):
    given = tokens(2, **shape)
    _, state = call(*one(given, 0))
    state.S.fill_(3e38)
    q, k, v, beta, decay = one(given, 1)
    with pytest.raises(ValueError, match="beyond the range"):
        call(q * 0 + 1, k * 0 + 1, v, beta, decay * 0, state=state, donate_state=True)


def dual(q):
    return fwAD.make_dual(q, torch.ones_like(q))


UNLIKE = {
    "gradients": lambda given, step: step(given[0].detach().requires_grad_(), *given[1:]),
    "strides": lambda given, step: step(given[0].repeat(1, 1, 1, 2)[..., ::2], *given[1:]),
    "negated view": lambda given, step: step(torch._neg_view(-given[0]), *given[1:]),
    "the same tensor twice": lambda given, step: step(given[1], *given[1:]),
    "shape": lambda given, step: step(*(x[:1] for x in given)),
    "dtype": lambda given, step: step(*(x.double() for x in given)),
    "parameter": lambda given, step: step(torch.nn.Parameter(given[0], requires_grad=False), *given[1:]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward gradients use it
@pytest.mark.parametrize("how", [*UNLIKE, "inference mode", "forward gradients"])
@pytest.mark.parametrize("call", [delta, sums])
def test_a_call_unlike_the_last_one_is_not_taken_for_it(call, how):
    given = tokens(2)
    first, second = one(given, 0), one(given, 1)
    _, state = call(*first)
    for _ in range(3):  # the plan of such calls is known from now on
        call(*second, state=state)

    def step(engine, *tensors):
        part = state.map(lambda _, x: x[: len(tensors[0])])
        out, after = call(*tensors, state=part, engine=engine)
        torch.testing.assert_close(after.tokens, part.tokens + 1)
        return out, after.S

    def both(run):
        return run(lambda *x: step("auto", *x)), run(lambda *x: step("torch", *x))

    if how == "inference mode":
        with torch.inference_mode():
            ours, theirs = both(lambda step: step(*[x.clone() for x in second]))
    elif how == "forward gradients":
        with fwAD.dual_level():
            ours, theirs = both(lambda step: step(dual(second[0]), *second[1:]))
            tangents = [fwAD.unpack_dual(x[0]).tangent for x in (ours, theirs)]
            assert tangents[0] is not None
            torch.testing.assert_close(*tangents, rtol=1e-5, atol=1e-5)
    else:
        ours, theirs = both(lambda step: UNLIKE[how](second, step))
        assert ours[0].requires_grad == (how == "gradients")
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_other_kernels_masks_and_gradients_take_the_flag_too():
    q, k, v, beta, decay = tokens(3)
    options = {"is_causal": True, "return_state": True}
    for kernel in ("elu", "softmax"):
        _, state = linattn.attention(q, k, v[..., :24], kernel=kernel, **options)
        plain = linattn.attention(q, k, v[..., :24], kernel=kernel, state=state.clone(), **options)
        donated = linattn.attention(q, k, v[..., :24], kernel=kernel, state=state, donate_state=True, **options)
        assert torch.equal(plain[0], donated[0])
    mask = torch.tensor([[True, False, True], [True, True, True]])
    _, state = delta(q, k, v, beta, decay)
    plain = delta(q, k, v, beta, decay, key_mask=mask, state=state.clone())
    donated = delta(q, k, v, beta, decay, key_mask=mask, state=state, donate_state=True)
    assert torch.equal(plain[0], donated[0])
    leaf = one([q, k, v, beta, decay], 0)[0].requires_grad_()
    out, _ = delta(leaf, *one([k, v, beta, decay], 0), state=state, donate_state=True)
    out.sum().backward()
    assert leaf.grad.abs().sum() > 0
