"""The arguments of linattn.attention, one by one: what torch's function means by them, and what is refused."""

import inspect
import typing

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import linattn
from conftest import DIM, KERNELS, assert_close, qkv, tokens
from linattn.kernels import KernelName, Positive
from linattn.kernels.names import NAMES
from linattn.ops.linear_attention import reference

ENGINES = ("torch", "native")


def test_positional_arguments_are_torchs():
    ours = list(inspect.signature(linattn.attention).parameters.values())
    names = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    query, key, value = qkv(20)
    theirs = scaled_dot_product_attention(query, key, value, None, 0.0, True)
    assert_close(linattn.attention(query, key, value, None, 0.0, True, kernel="softmax"), theirs)


def test_every_name_is_in_the_literal():
    assert typing.get_args(KernelName) == tuple(NAMES)
    query, key, value = qkv(9)
    for name in NAMES:
        assert linattn.attention(query, key, value, kernel=name).shape == value.shape


@pytest.mark.parametrize("kernel", ["softmax", "nearfar", "elu", "positive"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 30), (1, 1, 1, 30), (1, 30), (30,)])
def test_a_padding_attn_mask_is_a_key_mask(kernel, shape):
    query, key, value = qkv(30)
    mask = tokens(*shape, seed=5) > 0
    out = linattn.attention(query, key, value, mask, kernel=kernel)
    assert_close(out, linattn.attention(query, key, value, kernel=kernel, key_mask=mask.expand(2, 1, 1, 30)[:, 0, 0]))
    if kernel == "softmax" and len(shape) > 1:
        assert_close(out, scaled_dot_product_attention(query, key, value, mask))
    both = linattn.attention(query, key, value, mask, kernel=kernel, key_mask=tokens(2, 30, seed=6) > 0)
    each = mask.expand(2, 1, 1, 30)[:, 0, 0] & (tokens(2, 30, seed=6) > 0)
    assert_close(both, linattn.attention(query, key, value, kernel=kernel, key_mask=each))


@pytest.mark.parametrize("name", ["identity", "elu", "positive", "trig", "polynomial", "taylor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_numerator_alone(name, dtype):
    """normalize=False: sum_j exp(decay from j to i) phi(q_i).phi(k_j) v_j, outputs and gradients, in one call and in two."""
    query, key, value = qkv(130, heads=4, kv_heads=2, dtype=dtype, grad=True)
    log_decay = -tokens(2, 2, 130, seed=4, dtype=dtype).abs().requires_grad_()
    kernel = linattn.kernels.resolve(name, DIM, query.device)
    inputs = (query, key, value, log_decay)
    options = {"kernel": kernel, "is_causal": True, "enable_gqa": True, "normalize": False}
    out = linattn.attention(query, key, value, log_decay=log_decay, **options)
    twin = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, g = twin[0], *(x.repeat_interleave(2, 1) for x in twin[1:])
    passed = g.cumsum(-1)
    weight = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).tril().exp().tril()
    expected = (kernel.query_features(q) @ kernel.key_features(k).mT * weight) @ v
    assert_close(out, expected, factor=10)
    grads = torch.autograd.grad(out.sin().sum(), inputs)
    for got, want in zip(grads, torch.autograd.grad(expected.sin().sum(), twin), strict=True):
        assert_close(got, want, factor=100)
    cut = [x.detach() for x in inputs]
    first, state = linattn.attention(
        *(x[:, :, :50] for x in cut[:3]), log_decay=cut[3][..., :50], return_state=True, **options
    )
    rest = linattn.attention(*(x[:, :, 50:] for x in cut[:3]), log_decay=cut[3][..., 50:], state=state, **options)
    assert_close(torch.cat([first, rest], 2), expected, dtype, factor=10)


def test_identity_without_a_denominator_is_the_product():
    query, key, value = qkv(40)
    out = linattn.attention(query, key, value, kernel="identity", normalize=False, scale=0.3)
    assert_close(out, 0.3 * query @ key.mT @ value)
    native = linattn.attention(*qkv(40, dtype=torch.float32), kernel="identity", normalize=False, scale=0.3)
    assert_close(native, out)
    with pytest.raises(ValueError, match='engine="native" cannot serve this call: features with log-weights'):
        linattn.attention(*qkv(40, dtype=torch.float32), kernel="positive", normalize=False, engine="native")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "positive", "softmax", "nearfar"])
def test_packed_sequences_of_different_query_and_key_lengths_equal_themselves_alone(name, is_causal, engine):
    lengths = [(1, 5), (4, 4), (0, 3), (7, 2), (30, 70), (3, 0)]
    bounds = [torch.tensor([0, *(n[i] for n in lengths)]).cumsum(0) for i in (0, 1)]
    L, S = (int(b[-1]) for b in bounds)
    query, key, value = qkv(L, s=S, dtype=torch.float32)
    mask = tokens(2, S, seed=4) > -1
    kernel = linattn.NearFar(window=8, slots=8, block=8, sinks=2) if name == "nearfar" else name
    options = {"kernel": kernel, "is_causal": is_causal, "engine": engine}
    packed = linattn.attention(query, key, value, key_mask=mask, cu_seqlens=(bounds[0], bounds[1]), **options)
    for i in range(len(lengths)):
        q, k = (slice(int(b[i]), int(b[i + 1])) for b in bounds)
        alone = linattn.attention(query[:, :, q], key[:, :, k], value[:, :, k], key_mask=mask[:, k], **options)
        assert_close(packed[:, :, q], alone)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_masked_token_neither_writes_nor_decays(engine):
    query, key, value = qkv(60, dtype=torch.float32)
    log_decay = -tokens(2, 2, 60, seed=4, dtype=torch.float32).abs()
    seen = torch.arange(60) % 3 != 1
    options = {"kernel": "elu", "is_causal": True, "engine": engine, "return_state": True}
    out, state = linattn.attention(query, key, value, key_mask=seen.expand(2, -1), log_decay=log_decay, **options)
    kept = [x[:, :, seen] for x in (query, key, value)]
    without, left = linattn.attention(*kept, log_decay=log_decay[..., seen], **options)
    assert_close(out[:, :, seen], without)
    assert_close(state.S * state.log_scale.exp()[..., None, None], left.S * left.log_scale.exp()[..., None, None])


GATED = [
    *((engine, "elu", normalize) for engine in ENGINES for normalize in (True, False)),
    ("torch", "positive", False),
]


@pytest.mark.parametrize(("engine", "name", "normalize"), GATED)
def test_a_gate_of_one_has_its_gradient(engine, name, normalize):
    """S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t in plain products, where a gate of 1 is nothing special."""
    query, key, value = (x[0, 0] for x in qkv(12, dtype=torch.float32))
    gate = torch.sigmoid(tokens(1, 12, seed=4, dtype=torch.float32))
    gate[0, [0, 1, 5, 11]] = 1.0
    ours, theirs = gate.clone().requires_grad_(), gate.double().requires_grad_()
    kernel = KERNELS[name]()
    phi_q, phi_k = kernel.query_features(query.double()), kernel.key_features(key.double())
    S, Z, rows = torch.zeros(phi_k.shape[1], 5).double(), torch.zeros(phi_k.shape[1]).double(), []
    for t in range(12):
        S = theirs[0, t] * S + (1 - theirs[0, t]) * phi_k[t, :, None] * value[t]
        Z = theirs[0, t] * Z + (1 - theirs[0, t]) * phi_k[t]
        seen = t > 1  # the first two gates let nothing in
        rows.append(phi_q[t] @ S / (phi_q[t] @ Z if normalize else 1) if seen or not normalize else torch.zeros(5))
    options = {"kernel": kernel, "is_causal": True, "engine": engine, "normalize": normalize}
    out, state = linattn.attention(query, key, value, gate=ours, return_state=True, **options)
    expected = torch.stack([row.double() for row in rows])
    assert_close(out, expected)
    assert bool((out[:2] == 0).all())
    assert state.tokens.tolist() == [8] or not normalize
    _, before = linattn.attention(query[:2], key[:2], value[:2], gate=ours[:, :2], return_state=True, **options)
    again = linattn.attention(query[2:], key[2:], value[2:], gate=ours[:, 2:], state=before, **options)
    assert_close(again, expected[2:], torch.float32)
    for mine, right in ((out, expected), (again, expected[2:])):
        got = torch.autograd.grad(mine.sin().sum(), ours)[0]
        assert torch.isfinite(got).all()
        want = torch.autograd.grad(right.sin().sum(), theirs, retain_graph=True)[0]
        assert_close(got, want, torch.float32, factor=10)
    hidden = {"gate": torch.full((1, 1), 0.5), "key_mask": torch.tensor([False]), **options}
    assert bool((linattn.attention(query[:1], key[:1], value[:1], state=before, **hidden) == 0).all())


@pytest.mark.parametrize("name", ["positive", "trig", "elu", "nearfar"])
def test_the_first_call_of_a_name_may_be_anywhere(name):
    """Inference mode, fake tensors, vmap and default devices leave nothing of themselves in the kernel of that name."""
    dim = {"positive": 11, "trig": 13, "elu": 17, "nearfar": 19}[name]  # dims that no other test asks for
    query, key, value = (tokens(1, 2, 10, dim, seed=i, dtype=torch.float32) for i in range(3))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (query, key, value)]
        if name != "nearfar":  # its prefill depends on values
            assert linattn.attention(*fake, kernel=name).shape == value.shape
    with torch.inference_mode():
        inside = linattn.attention(query, key, value, kernel=name)
    outside = linattn.attention(query.requires_grad_(), key, value, kernel=name)
    torch.autograd.grad(outside.sum(), query)
    assert_close(inside, outside)
    if name != "nearfar":
        wide = (dim + 1,) if name != "elu" else (dim,)
        batch = [tokens(3, 1, 2, 10, *wide, seed=i, dtype=torch.float32) for i in range(3)]
        mapped = torch.func.vmap(lambda q, k, v: linattn.attention(q, k, v, kernel=name))(*batch)
        assert_close(mapped[1], linattn.attention(*(x[1] for x in batch), kernel=name))
        with torch.device("meta"):
            out = linattn.attention(*(x[0].detach() for x in batch), kernel=name)
        assert_close(out, mapped[0])


def test_a_named_kernel_cannot_be_changed():
    query, key, value = qkv(20, dtype=torch.float32)
    before = linattn.attention(query, key, value, kernel="positive")
    module = linattn.nn.MultiheadAttention(2 * DIM, 2, kernel="positive")
    module.to(torch.float16)
    linattn.kernels.resolve("positive", DIM, query.device).projection.zero_()
    assert torch.equal(linattn.attention(query, key, value, kernel="positive"), before)


def _by_data(kernel, new):
    kernel.projection.data.copy_(new)


def _by_numpy(kernel, new):
    kernel.projection.numpy()[...] = new.numpy()


def _one_number(kernel, new):
    kernel.projection.numpy()[3, 2] += 0.5


def _by_assignment(kernel, new):
    kernel.projection = new


@pytest.mark.parametrize("change", [_by_data, _by_numpy, _one_number, _by_assignment])
def test_the_native_engine_sees_changed_weights(change):
    kernel, other = Positive(DIM, 16), Positive(DIM, 16, seed=9)
    inputs = qkv(20, dtype=torch.float32)
    step = [x[:, :, :1] for x in inputs]
    options = {"kernel": kernel, "is_causal": True}
    _, state = linattn.attention(*inputs, return_state=True, **options)
    _, state = linattn.attention(*step, state=state, return_state=True, **options)  # the plan of a step is kept in it
    linattn.attention(*inputs, **options)
    change(kernel, other.projection)
    for tokens_, more in ((inputs, {}), (step, {"state": state, "return_state": True})):
        native, plain = (
            linattn.attention(*tokens_, engine=engine, **options, **more) for engine in ("native", "torch")
        )
        if more:
            native, plain = native[0], plain[0]
        assert_close(native, plain)


def test_the_native_engine_sees_changed_attributes():
    kernel, inputs = linattn.kernels.Polynomial(2, 1.0), qkv(20, dtype=torch.float32)
    linattn.attention(*inputs, kernel=kernel, engine="native")
    kernel.offset = 3.0
    assert_close(linattn.attention(*inputs, kernel=kernel), linattn.attention(*inputs, kernel=kernel, engine="torch"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_lazily_negated_tensors(is_causal):
    query, key, value = qkv(20, dtype=torch.float32)
    lazy = [torch._neg_view(x) for x in (query, key, value)]
    out, state = linattn.attention(-query, -key, -value, kernel="elu", is_causal=is_causal, return_state=True)
    got, same = linattn.attention(*lazy, kernel="elu", is_causal=is_causal, return_state=True)
    assert torch.equal(got, out)
    assert torch.equal(same.S, state.S)
    assert torch.equal(linattn.attention(*lazy, kernel="elu", is_causal=is_causal), out)
    step = [torch._neg_view(x[:, :, :1]) for x in (query, key, value)]
    options = {"kernel": "elu", "is_causal": True, "return_state": True}
    got, _ = linattn.attention(*step, state=state, **options)
    assert torch.equal(got, linattn.attention(*(x.resolve_neg() for x in step), state=state, **options)[0])


def test_tensor_subclasses_are_served_by_torch():
    class Tagged(torch.Tensor):
        pass

    query, key, value = qkv(20, dtype=torch.float32)
    tagged = query.as_subclass(Tagged)
    assert_close(
        linattn.attention(tagged, key, value, kernel="elu"), linattn.attention(query, key, value, kernel="elu")
    )
    with pytest.raises(ValueError, match="the tokens are Tagged, whose memory"):
        linattn.attention(tagged, key, value, kernel="elu", engine="native")


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_have_shapes(name):
    query, key, value = (x.to("meta") for x in qkv(10, heads=4, kv_heads=2, dtype=torch.float32))
    options = {"kernel": name, "is_causal": True, "enable_gqa": True}
    for mask in (None, torch.ones(2, 10, dtype=torch.bool, device="meta")):
        out = linattn.attention(query, key, value, key_mask=mask, **options)
        assert (out.device.type, out.shape) == ("meta", (2, 4, 10, 5))
    if name == "nearfar":
        with pytest.raises(ValueError, match="depends on numbers, which tensors on the meta device do not have"):
            linattn.attention(query, key, value, return_state=True, **options)
        return
    _, state = linattn.attention(query, key, value, return_state=True, **options)
    _, real = linattn.attention(*qkv(10, heads=4, kv_heads=2, dtype=torch.float32), return_state=True, **options)
    assert {n: x.shape for n, x in state.tensors().items()} == {n: x.shape for n, x in real.tensors().items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_default_device_plays_no_part(name):
    inputs = qkv(300, heads=4, kv_heads=2, dtype=torch.float32)
    options = {"kernel": name, "is_causal": True, "enable_gqa": True, "return_state": True}
    step = [x[:, :, :1] for x in inputs]
    rows, state = linattn.attention(*inputs, **options)
    row, _ = linattn.attention(*step, state=state, **options)
    with torch.device("meta"):
        inside, state = linattn.attention(*inputs, **options)
        assert torch.equal(inside, rows)
        assert torch.equal(linattn.attention(*step, state=state, **options)[0], row)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("budget", [2**20, 1])
def test_second_derivatives(monkeypatch, budget, is_causal):
    """In one segment and in many."""
    monkeypatch.setattr(linattn.engines.torch_engine.checkpointing, "BUDGET", budget)

    def twice(attend):
        inputs = qkv(100, batch=(1,), heads=1, grad=True)
        first = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    kernel = Positive(DIM, 6)
    got = twice(lambda q, k, v: linattn.attention(q, k, v, kernel=kernel, is_causal=is_causal, engine="torch"))
    want = twice(lambda q, k, v: reference.attention(q, k, v, kernel, is_causal=is_causal))
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


def test_second_derivatives_of_the_native_engine_name_the_other():
    query, key, value = qkv(20, dtype=torch.float32, grad=True)
    for is_causal in (False, True):
        out = linattn.attention(query, key, value, kernel="elu", is_causal=is_causal, engine="native")
        (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        with pytest.raises(RuntimeError, match=r'no second derivatives: call .* engine="torch"'):
            grad.sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0), (2, 0, 70), (2, 70, 0)])
@pytest.mark.parametrize("name", ["elu", "positive", "custom", "softmax", "nearfar"])
def test_empty_batches_queries_and_keys(name, sizes, engine):
    B, L, S = sizes
    kernel = KERNELS[name]() if name == "custom" else name
    trained = not (name == "nearfar" and engine == "native")  # which trains in torch alone
    query, key, value = qkv(L, s=S, batch=(B,), heads=4, kv_heads=2, dtype=torch.float32, grad=trained)
    for is_causal in (False, True):
        options = {"kernel": kernel, "is_causal": is_causal, "enable_gqa": True, "engine": engine}
        out, state = linattn.attention(query, key, value, return_state=True, **options)
        assert out.shape == (B, 4, L, 5)
        assert S or not out.any()
        assert linattn.attention(query, key, value, state=state, **options).shape == out.shape
        mask = torch.ones(B, S, dtype=torch.bool)
        assert linattn.attention(query, key, value, key_mask=mask, **options).shape == out.shape
