"""Every linear kernel equals its O(N^2) definition: outputs and gradients, every form, every dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn
from conftest import DIM, KERNELS, SIGNED, assert_close, forgetting, qkv, tokens
from linattn.engines import checkpointing
from linattn.kernels import Kernel
from linattn.ops.linear_attention import reference as oracle

FORMS = {"full": False, "causal": True}


def gradients(out, inputs):
    weights = tokens(*out.shape, seed=9, dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("is_causal", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_and_gradients_equal_the_definition(kernel: Kernel, is_causal, dtype):
    query, key, value = qkv(150, dtype=dtype, grad=True)
    out = linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal)
    # The twin is always float64: the float32 form is compared with the truth, not with another rounding of it.
    twin = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = oracle.attention(*twin, kernel, is_causal=is_causal)
    assert out.dtype == dtype
    assert_close(out, expected)
    for got, want in zip(gradients(out, (query, key, value)), gradients(expected, twin), strict=False):
        assert_close(got, want)


@pytest.mark.parametrize("is_causal", FORMS.values(), ids=FORMS)
def test_gradients_of_kernel_parameters_equal_the_definition(is_causal):
    for name in ("learned", "custom", "trig-temperature"):
        kernel = KERNELS[name]()
        parameters = list(kernel.parameters())
        query, key, value = qkv(70)
        out = linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal)
        expected = oracle.attention(query, key, value, kernel, is_causal=is_causal)
        for got, want in zip(gradients(out, parameters), gradients(expected, parameters), strict=False):
            assert want.abs().max() > 0
            assert_close(got, want, torch.float32)


@pytest.mark.parametrize("is_causal", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", SIGNED)
def test_signed_kernels_equal_the_definition(name, is_causal):
    kernel = SIGNED[name]()
    query, key, value = qkv(40)
    query, key = query * 0.3, key * 0.3
    out = linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal)
    assert_close(out, oracle.attention(query, key, value, kernel, is_causal=is_causal), torch.float32)


@pytest.mark.parametrize("tokens_", [0, 1, 2, 63, 64, 65, 127, 129, 200])
def test_odd_lengths(kernel: Kernel, tokens_):
    query, key, value = qkv(tokens_)
    for is_causal in (False, True):
        out = linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal)
        assert_close(out, oracle.attention(query, key, value, kernel, is_causal=is_causal))


@pytest.mark.parametrize(("queries", "keys"), [(5, 90), (90, 5), (1, 70), (70, 1), (0, 9), (9, 0), (64, 128)])
def test_cross_attention_and_bottom_right_alignment(kernel: Kernel, queries, keys):
    query, key, value = qkv(queries, s=keys)
    for is_causal in (False, True):
        out = linattn.attention(query, key, value, kernel=kernel, is_causal=is_causal)
        # With a single key the denominator of a polynomial may come near zero, and digits are lost in it.
        assert_close(out, oracle.attention(query, key, value, kernel, is_causal=is_causal), factor=100)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1), (3, 3)])
def test_groups_of_query_heads_share_keys(kernel: Kernel, heads, kv_heads):
    query, key, value = qkv(80, heads=heads, kv_heads=kv_heads, grad=True)
    for is_causal in (False, True):
        options = {"kernel": kernel, "is_causal": is_causal, "enable_gqa": True, "return_state": True}
        out, state = linattn.attention(query, key, value, **options)
        repeated = [x.repeat_interleave(heads // kv_heads, 1) for x in (key, value)]
        expected = oracle.attention(query, *repeated, kernel, is_causal=is_causal)
        assert state.S.shape[1] == kv_heads
        assert_close(out, expected)
        for got, want in zip(
            gradients(out, (query, key, value)), gradients(expected, (query, key, value)), strict=False
        ):
            assert_close(got, want)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (1, 2, 1)])
def test_any_number_of_batch_dimensions(batch):
    query, key, value = qkv(20, batch=batch)
    out = linattn.attention(query, key, value, kernel="elu", is_causal=True)
    assert_close(out, oracle.attention(query, key, value, linattn.kernels.Elu(), is_causal=True))


def test_no_heads_at_all():
    query, key, value = (x[0, 0] for x in qkv(20))
    out, state = linattn.attention(query, key, value, kernel="elu", is_causal=True, return_state=True)
    assert out.shape == (20, 5)
    assert state.S.shape == (1, DIM, 5)
    assert_close(out, oracle.attention(query, key, value, linattn.kernels.Elu(), is_causal=True))


def test_batch_dimensions_broadcast():
    query, key, value = qkv(20, batch=(3,))
    out = linattn.attention(query, key[:1], value[:1], kernel="elu")
    assert_close(out, oracle.attention(query, key[:1], value[:1], linattn.kernels.Elu()))


@pytest.mark.parametrize("form", ["log_decay", "gate"])
def test_decay_gates_equal_the_definition(kernel: Kernel, form):
    query, key, value = qkv(150, grad=True)
    forget = torch.rand(2, 2, 150, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
    inputs = (query, key, value, forget)
    out = linattn.attention(query, key, value, kernel=kernel, is_causal=True, **forgetting(form, forget))
    expected = oracle.attention(query, key, value, kernel, is_causal=True, **forgetting(form, forget))
    assert_close(out, expected)
    for got, want in zip(gradients(out, inputs), gradients(expected, inputs), strict=False):
        assert_close(got, want, factor=100)


def test_decay_follows_its_recursion():
    """S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t, written as it reads."""
    query, key, value = (x[0, 0] for x in qkv(30))
    gate = torch.rand(1, 30, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    kernel = linattn.kernels.Elu()
    phi_q, phi_k = kernel.query_features(query), kernel.key_features(key)
    S, Z, rows = torch.zeros(DIM, 5, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64), []
    for t in range(30):
        S = gate[0, t] * S + (1 - gate[0, t]) * phi_k[t, :, None] * value[t]
        Z = gate[0, t] * Z + (1 - gate[0, t]) * phi_k[t]
        rows.append(phi_q[t] @ S / (phi_q[t] @ Z))
    out, state = linattn.attention(query, key, value, kernel=kernel, is_causal=True, gate=gate, return_state=True)
    assert_close(out, torch.stack(rows))
    assert_close(state.S[0] * state.log_scale[0].exp(), S)


def test_long_decay_keeps_its_digits():
    """Logarithms of decay add up to thousands over a long sequence; float32 must not lose them."""
    query, key, value = qkv(5000, batch=(1,), heads=1, dtype=torch.float32)
    decay = torch.rand(1, 1, 5000, generator=torch.Generator().manual_seed(5)) * 0.9 + 0.05
    decay = decay.log()
    out = linattn.attention(query, key, value, kernel="elu", is_causal=True, log_decay=decay)
    twin = linattn.attention(
        *(x.double() for x in (query, key, value)), kernel="elu", is_causal=True, log_decay=decay.double()
    )
    assert_close(out, twin)


@pytest.mark.parametrize("name", KERNELS)
def test_many_segments_equal_one(name, monkeypatch):
    """The memory-saving paths (in place, sweep, checkpoint) give the numbers of the plain one."""
    kernel = KERNELS[name]()
    query, key, value = qkv(300, grad=True)
    _, state = linattn.attention(*qkv(20), kernel=kernel, is_causal=True, return_state=True)
    state = state.detach()
    state.S.requires_grad_()
    state.Z.requires_grad_()
    parameters = [p for p in kernel.parameters() if p.requires_grad]
    inputs = [query, key, value, state.S, state.Z, *parameters]
    forget = torch.rand(2, 2, 300, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for options in ({}, {"is_causal": True}, {"is_causal": True, "log_decay": forget.log()}):
        results = []
        for budget in (2**30, 1):
            monkeypatch.setattr(checkpointing, "BUDGET", budget)
            out, new = linattn.attention(query, key, value, kernel=kernel, state=state, return_state=True, **options)
            grads = torch.autograd.grad(
                out.square().sum() + new.S.sum() + new.Z.square().sum(), inputs, allow_unused=True
            )
            with torch.no_grad():
                again = linattn.attention(query, key, value, kernel=kernel, state=state, **options)
            results.append([out, again, new.S, new.log_scale, new.guarded, *grads])
        for one, many in zip(*results, strict=False):
            assert (one is None) == (many is None)
            if one is not None:
                assert_close(many, one, torch.float32 if one.dtype == torch.float32 else torch.float64, factor=100)


def test_gradients_pass_through_a_custom_kernel_that_uses_an_outside_tensor(monkeypatch):
    """A user's function may use any tensor; recomputing must not lose its gradient."""
    monkeypatch.setattr(checkpointing, "BUDGET", 1)
    weight = tokens(DIM, DIM, grad=True)
    kernel = linattn.kernels.Custom(lambda x: (x @ weight.to(x.dtype)).square())
    query, key, value = qkv(200)
    out = linattn.attention(query, key, value, kernel=kernel, is_causal=True)
    expected = oracle.attention(query, key, value, kernel, is_causal=True)
    assert_close(gradients(out, [weight])[0], gradients(expected, [weight])[0])


@pytest.mark.parametrize("is_causal", FORMS.values(), ids=FORMS)
def test_gradcheck(kernel: Kernel, is_causal):
    query, key, value = qkv(5, batch=(1,), grad=True, value_dim=2)
    call = lambda q, k, v: linattn.attention(q, k, v, kernel=kernel, is_causal=is_causal)  # noqa: E731
    if kernel.__class__.__name__ == "Relu":
        query, key = (x.detach().abs().add(0.1).requires_grad_() for x in (query, key))
    assert torch.autograd.gradcheck(call, (query, key, value), fast_mode=True)  # random directions; all of them above


@pytest.mark.parametrize("scale", [0.05, 0.7])
def test_scale_multiplies_the_logit(kernel: Kernel, scale):
    query, key, value = qkv(30)
    out = linattn.attention(query, key, value, kernel=kernel, scale=scale)
    assert_close(out, oracle.attention(query, key, value, kernel, scale=scale))
    if getattr(kernel, "precondition", None) is None and type(kernel).__name__ != "Trig":
        root = (scale / kernel.default_scale(DIM)) ** 0.5
        assert_close(out, linattn.attention(query * root, key * root, value, kernel=kernel))


@pytest.mark.parametrize("name", ["nearfar", "softmax"])
@pytest.mark.parametrize("is_causal", FORMS.values(), ids=FORMS)
def test_exact_is_torchs_own(name, is_causal):
    query, key, value = qkv(50)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    assert_close(linattn.attention(query, key, value, kernel=name, is_causal=is_causal), expected)


def test_exact_aligns_bottom_right():
    query, key, value = qkv(7, s=20)
    kernel = linattn.kernels.Softmax()
    out = linattn.attention(query, key, value, kernel=kernel, is_causal=True)
    assert_close(out, oracle.attention(query, key, value, kernel, is_causal=True))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_form(data):
    """Hypothesis looks for a shape, a mask and a form in which the linear form is not its definition."""
    name = data.draw(st.sampled_from(sorted(KERNELS)))
    kv_heads, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    L, S = data.draw(st.integers(0, 140)), data.draw(st.integers(0, 140))
    query, key, value = qkv(L, s=S, heads=kv_heads * groups, kv_heads=kv_heads, value_dim=data.draw(st.integers(1, 4)))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * S, max_size=2 * S)), dtype=torch.bool).view(2, S)
    options = {"is_causal": data.draw(st.booleans()), "key_mask": data.draw(st.sampled_from([mask, None]))}
    kernel = KERNELS[name]()
    out = linattn.attention(query, key, value, kernel=kernel, enable_gqa=True, **options)
    expected = oracle.attention(query, key, value, kernel, **options)
    condition = cancellation(kernel, query, key.repeat_interleave(groups, 1), **options).unsqueeze(-1)
    assert_close(expected + (out - expected) / condition, expected, factor=100)


def cancellation(kernel, query, key, is_causal, key_mask):
    """(B, heads, L), at least 1: by how much a row enlarges the rounding of its features. (q.k + 1)^2 may nearly vanish."""
    L, S = query.shape[2], key.shape[2]
    visible = torch.ones(L, S, dtype=torch.bool).tril(S - L) if is_causal else torch.ones(L, S, dtype=torch.bool)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    features = kernel.query_features(query), kernel.key_features(key)
    total, mass = ((x @ y.mT * visible).sum(-1) for x, y in (features, [x.abs() for x in features]))
    return (mass / total.abs().clamp_min(1e-300)).detach().clamp_min(1)
