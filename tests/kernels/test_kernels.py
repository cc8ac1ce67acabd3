"""Kernels: features reproduce the similarity, exactly or on average; seeds, options and saving."""

import copy
import math

import pytest
import torch

import linattn
from conftest import DIM, KERNELS, SIGNED, assert_close, qkv, statistics, tokens
from linattn import kernels
from linattn.kernels.positive import optimal_exponent

ALL = {**KERNELS, **SIGNED}
EXACT_FEATURES = [
    "polynomial-2",
    "polynomial-3",
    "polynomial-4",
    "taylor",
    "taylor-preconditioned",
    "elu",
    "relu",
    "learned",
]


@pytest.mark.parametrize("name", EXACT_FEATURES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_features_give_the_similarity_exactly(name, scale):
    kernel = ALL[name]()
    x, y = tokens(3, 7, DIM, seed=1), tokens(3, 5, DIM, seed=2)
    product = kernel.query_features(x, scale=scale) @ kernel.key_features(y, scale=scale).mT
    assert_close(product, kernel.similarity(x, y, scale=scale), torch.float64 if "pre" not in name else torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_feature_dim_is_what_comes_out(name):
    kernel = ALL[name]()
    x = tokens(2, 3, 4, DIM, dtype=torch.float32)
    assert kernel.query_features(x).shape == kernel.key_features(x).shape == (2, 3, 4, kernel.feature_dim)
    assert kernel.features_for(DIM) == kernel.feature_dim


def test_feature_counts():
    assert kernels.Polynomial(2, 1.0, dim=64).feature_dim == 1 + 64 + 64 * 65 // 2
    assert kernels.Polynomial(2, 0.0, dim=64).feature_dim == 64 * 65 // 2
    assert kernels.Polynomial(3, 1.0, dim=8).feature_dim == math.comb(11, 3)
    assert kernels.Taylor(2, dim=64).feature_dim == 1 + 64 + 64 * 65 // 2
    assert kernels.Trig(64, 100).feature_dim == 200
    with pytest.raises(
        ValueError, match=r"Elu takes tokens of any dim: pass Elu\(..., dim=\) or ask features_for\(dim\)"
    ):
        _ = kernels.Elu().feature_dim


def average_product(make, x, y, draws=400):
    """Mean and standard error of phi(x).phi(y) over kernels of different seeds."""
    found = torch.stack([make(seed).query_features(x) @ make(seed).key_features(y).mT for seed in range(draws)])
    return found.mean(0), found.std(0) / math.sqrt(draws)


UNBIASED = {
    "positive": lambda seed: kernels.Positive(DIM, 64, seed=seed),
    "positive-iid": lambda seed: kernels.Positive(DIM, 64, orthogonal=False, seed=seed),
    "positive-hyperbolic": lambda seed: kernels.Positive(DIM, 64, hyperbolic=True, seed=seed),
    "FAVOR++": lambda seed: kernels.Positive(DIM, 64, optimal=True, seed=seed),
    "OPRF": lambda seed: kernels.Positive(DIM, 64, optimal=True, orthogonal=False, seed=seed),
    "trig": lambda seed: kernels.Trig(DIM, 64, seed=seed),
    "trig-orthogonal": lambda seed: kernels.Trig(DIM, 64, orthogonal=True, temperature=0.5, seed=seed),
    "tensor sketch": lambda seed: kernels.Polynomial(2, 1.0, sketch=64, dim=DIM, seed=seed),
    "preconditioned": lambda seed: kernels.Positive(DIM, 64, precondition=_statistics(), seed=seed),
}


def _statistics():
    return kernels.Precondition.from_samples(tokens(1, 300, DIM, seed=1) + 0.5, tokens(1, 300, DIM, seed=2) * 0.5 - 0.2)


@pytest.mark.parametrize("name", UNBIASED)
def test_random_features_are_unbiased(name):
    x, y = tokens(4, DIM, seed=1, spread=0.6), tokens(4, DIM, seed=2, spread=0.6)
    mean, error = average_product(UNBIASED[name], x, y)
    deviation = (mean - UNBIASED[name](0).similarity(x, y)).abs() / error
    assert deviation.max() < 4.5  # standard errors, 16 products
    assert error.max() < 0.1 * mean.abs().max()  # and the estimate says something


@pytest.mark.filterwarnings("ignore:Trig.normalize=False. is for study")
def test_plain_trig_is_unbiased_and_the_printed_variance_is_wrong():
    """w ~ N(0, I / sigma^2) gives the Gaussian kernel of width sigma; w ~ N(0, sigma^2 I), as printed, does not."""
    x, y = tokens(4, DIM, seed=1), tokens(4, DIM, seed=2)
    truth = (x @ y.T / math.sqrt(DIM)).exp()
    mean, error = average_product(lambda seed: kernels.Trig(DIM, 64, normalize=False, seed=seed), x, y)
    assert ((mean - truth).abs() / error).max() < 4.5

    def printed(seed):
        kernel = kernels.Trig(DIM, 64, normalize=False, seed=seed)
        kernel.projection *= math.sqrt(DIM)  # from N(0, I / sigma^2) to N(0, sigma^2 I), sigma^2 = sqrt(dim)
        return kernel

    mean, error = average_product(printed, x, y)
    assert ((mean - truth).abs() / error).max() > 20


def test_plain_trig_warns():
    with pytest.warns(UserWarning, match="denominators are not positive in about half of the rows"):
        kernels.Trig(DIM, 8, normalize=False)


def test_cross_terms_are_not_forgotten():
    """[1, sqrt2 x_i, x_i^2] alone is not (q.k + 1)^2."""
    x, y = tokens(1, DIM, seed=1), tokens(1, DIM, seed=2)
    truth = (x @ y.T + 1).square()
    short = [torch.cat([torch.ones(1, 1), math.sqrt(2) * z, z.square()], -1) for z in (x, y)]
    assert not torch.allclose(short[0] @ short[1].T, truth, rtol=1e-3)
    kernel = kernels.Polynomial(2, 1.0)
    assert_close(kernel.query_features(x) @ kernel.key_features(y).T, truth)


def test_orthogonal_rows_and_their_norms():
    projection = kernels.Positive(DIM, 3 * DIM, seed=4).projection.double()
    for block in projection.split(DIM):
        gram = block @ block.T
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-5 * gram.max()
    norms = torch.stack([kernels.Positive(DIM, DIM, seed=s).projection.square().sum(-1) for s in range(300)])
    assert abs(norms.mean().item() - DIM) < 0.3
    assert abs(norms.var().item() - 2 * DIM) < 2.0


def variance(make, x, y):
    found = torch.stack([(make(s).query_features(x) * make(s).key_features(y)).sum(-1) for s in range(300)])
    return found.var(0).mean().item()


def test_orthogonal_and_optimal_features_vary_less():
    x, y = tokens(64, 16, seed=1, spread=0.8), tokens(64, 16, seed=2, spread=0.8)
    iid = variance(lambda s: kernels.Positive(16, 16, orthogonal=False, seed=s), x, y)
    orthogonal = variance(lambda s: kernels.Positive(16, 16, seed=s), x, y)
    optimal = variance(lambda s: kernels.Positive(16, 16, optimal=True, seed=s), x, y)
    assert orthogonal < 0.95 * iid
    assert optimal < 0.8 * orthogonal


def test_the_optimal_exponent_is_a_minimum():
    """E[phi(x)^2 phi(y)^2] as a function of A, where |x + y|^2 is the given mean: least at the exponent that is used."""
    dim, square = 16, 8.0
    best = optimal_exponent(dim, square)

    def log_second_moment(A):  # (1-4A)^d E exp(4A|w|^2 + 2 sqrt(1-4A) w.(x+y)), in closed form
        return dim * math.log(1 - 4 * A) - dim / 2 * math.log(1 - 8 * A) + 2 * (1 - 4 * A) / (1 - 8 * A) * square

    around = [log_second_moment(best + step) for step in (-0.01, 0.0, 0.01)]
    assert around[1] < around[0]
    assert around[1] < around[2]


def softmax_error(query, key, value, precondition):
    """Mean relative error of positive features over eight draws."""
    exact = linattn.attention(query, key, value, kernel="softmax")
    found = []
    for seed in range(8):
        kernel = kernels.Positive(DIM, 256, precondition=precondition, seed=seed)
        found.append((linattn.attention(query, key, value, kernel=kernel) - exact).norm() / exact.norm())
    return torch.stack(found).mean().item()


def test_centring_and_balancing_lower_the_error():
    query, key, value = qkv(200, dtype=torch.float32)
    measure = kernels.Precondition.from_samples
    shifted = (query * 0.7 + 1.5, key * 0.7 + 1.5, value)
    centred = softmax_error(*shifted, measure(*shifted[:2], balanced=False))
    assert centred < 0.5 * softmax_error(*shifted, None)
    stretch = torch.linspace(0.3, 2.0, DIM)
    uneven = (query * stretch * 0.7, key / stretch * 0.7, value)
    balanced = softmax_error(*uneven, measure(*uneven[:2]))
    assert balanced < 0.6 * softmax_error(*uneven, measure(*uneven[:2], balanced=False))
    assert softmax_error(*uneven, measure(*uneven[:2], per_head=True)) < 1.2 * balanced


def test_preconditioning_keeps_every_product():
    """The changed vectors and their shifts give back q.k exactly, for every query and key."""
    query, key = tokens(4, 30, DIM, seed=1) + 2, tokens(2, 30, DIM, seed=2) - 1
    for per_head in (False, True):
        precondition = kernels.Precondition.from_samples(query, key, per_head=per_head).double()
        x, row = precondition.query(query)
        y, column = (z.repeat_interleave(2, 0) for z in precondition.key(key))
        product = x @ y.mT + row.unsqueeze(-1) + column.unsqueeze(-2)
        assert_close(product, query @ key.repeat_interleave(2, 0).mT, torch.float32)


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_gives_the_same_kernel_and_a_state_dict_restores_it(name):
    kernel, again = ALL[name](), ALL[name]()
    x = tokens(3, DIM, dtype=torch.float32)
    assert torch.equal(kernel.query_features(x), again.query_features(x))
    with torch.no_grad():
        for tensor in [*again.parameters(), *again.buffers()]:
            tensor.copy_(torch.zeros_like(tensor))
    again.load_state_dict(kernel.state_dict())
    assert torch.equal(kernel.query_features(x), again.query_features(x))


def test_another_seed_gives_another_draw():
    x = tokens(3, DIM, dtype=torch.float32)
    assert not torch.equal(
        kernels.Positive(DIM, 8, seed=0).query_features(x), kernels.Positive(DIM, 8, seed=1).query_features(x)
    )


def test_drawing_a_kernel_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    (
        kernels.Positive(DIM, 99, seed=77),
        kernels.Trig(DIM, 99, seed=77),
        kernels.Polynomial(3, sketch=50, dim=DIM, seed=77),
    )
    assert torch.equal(torch.randn(3), expected)


def test_names_build_one_default_each():
    device = torch.device("cpu")
    for name in kernels.NAMES:
        one, other = kernels.resolve(name, 24, device), kernels.resolve(name, 24, device)
        assert one is not other  # whoever keeps one may change it
        assert one.signature() == other.signature()
    assert torch.equal(kernels.resolve("positive", 24, device).projection, kernels.Positive(24).projection)


def test_reprs_say_what_a_kernel_is():
    assert repr(kernels.Positive(8, 16)) == "Positive(dim=8, features=16, orthogonal=True, seed=0)"
    assert repr(kernels.Polynomial()) == "Polynomial(degree=2, offset=1)"
    assert (
        kernels.Trig(8, 4, temperature=2.0).extra_repr() == "dim=8, features=4, normalize=True, seed=0, temperature=2"
    )
    assert kernels.Elu().signature(0.5) == "Elu() scale=0.5"


PRECONDITIONED = {
    "positive": lambda p: kernels.Positive(DIM, 24, precondition=p),
    "taylor": lambda p: kernels.Taylor(2, precondition=p),
    "trig": lambda p: kernels.Trig(DIM, 24, normalize=False, precondition=p),
}


@pytest.mark.filterwarnings("ignore:Trig.normalize=False. is for study")
@pytest.mark.parametrize("name", PRECONDITIONED)
def test_a_state_refuses_another_precondition(name):
    make, inputs = PRECONDITIONED[name], qkv(20)
    other = kernels.Precondition.from_samples(tokens(2, 50, DIM, seed=8), tokens(2, 50, DIM, seed=9))
    made = [make(p) for p in (None, statistics(), other)]
    assert len({kernel.signature() for kernel in made}) == 3
    assert made[1].signature() == make(statistics()).signature() == copy.deepcopy(made[1]).float().signature()
    _, state = linattn.attention(*inputs, kernel=made[1], is_causal=True, return_state=True, engine="torch")
    for kernel in (made[0], made[2]):
        with pytest.raises(ValueError, match="it cannot go on with"):
            linattn.attention(*inputs, kernel=kernel, is_causal=True, state=state)
    before = made[2].signature()
    made[2].load_state_dict(made[1].state_dict())
    assert made[2].signature() == made[1].signature() != before
    with torch.no_grad():
        made[2].precondition.key_mean.add_(1)
    assert made[2].signature() not in (made[1].signature(), before)


def test_the_digest_of_a_precondition_is_worked_out_once(monkeypatch):
    kernel = kernels.Taylor(2, precondition=statistics())
    monkeypatch.setattr("hashlib.blake2b", None)
    assert kernel.signature() == kernel.signature()


def test_a_compiled_graph_knows_the_precondition():
    torch._dynamo.reset()
    kernel = kernels.Taylor(2, precondition=statistics())
    kernel.load_state_dict({name: x + 1 for name, x in kernel.state_dict().items()})

    def call(state, *inputs):
        return linattn.attention(*inputs, kernel=kernel, is_causal=True, state=state, return_state=True, engine="torch")

    _, state = torch.compile(call, fullgraph=True, backend="eager")(None, *qkv(20))
    assert state.kernel == kernel.signature()
    call(state, *qkv(20))


def test_learned_starts_as_the_identity_and_can_have_a_map_per_head():
    x = tokens(2, 4, 5, DIM, dtype=torch.float32)
    kernel = kernels.Learned(DIM, heads=4, kv_heads=2)
    assert torch.equal(kernel.query_features(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))
    assert kernel.key_features(x[:, :2]).shape == (2, 2, 5, 2 * DIM)
    with pytest.raises(ValueError, match="Learned has maps for 2 heads"):
        kernel.key_features(x)


def test_learned_can_be_trained_towards_softmax():
    query, key, value = qkv(64, dtype=torch.float32)
    target = linattn.attention(query, key, value, kernel="softmax")
    kernel = kernels.Learned(DIM, 32)
    optimizer = torch.optim.Adam(kernel.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = (linattn.attention(query, key, value, kernel=kernel) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
