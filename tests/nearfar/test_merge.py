"""The native merge of slots: the plan of the torch engine, nothing lost in pooling, and no slot touched without need."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.nearfar import merge as slots
from linattn.nearfar import native_merge
from native_support import close, isa, needs_native

pytestmark = needs_native
__all__ = ["isa"]


def problem(n, dim, value_dim, heads=3, seed=0, empty=0, dtype=torch.float32):
    """Slots with biases, some of them empty, and the statistics of some queries."""
    g = torch.Generator().manual_seed(seed)
    entries = torch.randn(2, heads, n, dim + value_dim, generator=g)
    bias = torch.rand(2, heads, n, generator=g) * 3
    for i in torch.randperm(n, generator=g)[:empty]:
        entries[:, :, i], bias[:, :, i] = 0, -torch.inf
    queries = torch.randn(2, heads, 4 * dim + 1, dim, generator=g) + torch.randn(2, heads, 1, dim, generator=g)
    x = torch.nn.functional.pad(queries, (0, 1), value=1.0)
    anchor, metric = slots.anchor_and_metric(slots.query_moments(x))
    return [x.to(dtype) for x in (entries, bias)], [x.to(dtype) for x in (anchor, metric)]


def pairs(count, dim, value_dim):
    """Slots that come in pairs far apart, the distance inside pair i growing with i: no two costs are close."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(1, 1, count, dim + value_dim, generator=g) * 4
    way = torch.nn.functional.normalize(torch.randn(1, 1, count, dim, generator=g), dim=-1)
    other = centres.clone()
    other[..., :dim] += way * (0.01 * 1.3 ** torch.arange(count))[:, None]
    return torch.cat([centres, other], 2), torch.zeros(1, 1, 2 * count)


def distortion(entries, new, place, metric):
    """Squared distance of all keys from their new slots, in the metric of the queries."""
    dim = metric.shape[-1]
    way = (entries - new.gather(2, place.unsqueeze(-1).expand_as(entries)))[..., :dim].double()
    return float((way.square() * metric.double()).sum())


@pytest.mark.parametrize("n", [2, 17, 130, 192, 300])
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (7, 5), (16, 33), (64, 64)])
@pytest.mark.parametrize("observed", [False, True])
def test_as_the_torch_engine_in_float64(isa, n, dim, value_dim, observed):
    for size in {1, n // 2, n - 1} - {0}:
        tokens, statistics = problem(n, dim, value_dim, seed=n + dim)
        rate = torch.rand(2, 3, n, generator=torch.Generator().manual_seed(n)) ** 4 if observed else None
        got = native_merge.merge(*tokens, rate, size, *statistics, 0.25)
        wide = [x.double() for x in tokens], [x.double() for x in statistics]
        expected = slots.merge(*wide[0], None if rate is None else rate.double(), size, *wide[1], 0.25)
        ours, theirs = (distortion(tokens[0], new, place, statistics[1]) for new, _, place in (got, expected))
        spread = distortion(tokens[0], torch.zeros_like(got[0]), got[2], statistics[1])
        assert abs(ours - theirs) <= 0.01 * theirs + 1e-6 * spread
        if dim == 1:  # a line of so many points has costs that float32 cannot tell apart
            continue
        # Slots whose importance agrees to the last bits may change places: what each old slot became is compared.
        index = [place.unsqueeze(-1) for place in (got[2], expected[2])]
        close(
            *(
                new.gather(2, at.expand(-1, -1, -1, dim + value_dim))
                for new, at in zip((got[0], expected[0]), index, strict=True)
            )
        )
        close(got[1].gather(2, got[2]), expected[1].gather(2, expected[2]))


@pytest.mark.parametrize("merge", [native_merge.merge, slots.merge])
@pytest.mark.parametrize(("size", "kept"), [(256, True), (255, False)])
def test_heads_with_many_slots_keep_keys_that_no_query_asked_for(isa, merge, size, kept):
    """32 keys without attention beside pairs that are nearly equal: pairs merge first if there are 256 slots or more."""
    alone, dim, g = 32, 16, torch.Generator().manual_seed(0)
    twins = torch.randn(1, 1, (size + 64 - alone) // 2, dim + 4, generator=g)
    twins = torch.cat([twins, twins + 0.05], 2)
    others = torch.randn(1, 1, alone, dim + 4, generator=g)
    others[..., 0] -= 12  # away from the mean query: the Gaussian model does not expect that they are asked for
    entries = torch.cat([others, twins], 2)
    rate = torch.cat([torch.zeros(alone), torch.linspace(1, 2, twins.shape[2])]).expand(1, 1, -1)
    anchor, metric = torch.eye(dim)[:1].expand(1, 1, 1, -1), torch.full((1, 1, 1, dim), 0.01)
    place = merge(entries, torch.zeros(1, 1, entries.shape[2]), rate, size, anchor, metric, 1.0)[2][0, 0]
    members = torch.bincount(place, minlength=size)
    assert bool((members[place[:alone]] == 1).all()) == kept


def test_closest_pairs_first(isa):
    """Ten of twenty pairs have to go: the ten closest ones, and every other slot keeps its bits."""
    dim, value_dim = 8, 3
    entries, bias = pairs(20, dim, value_dim)
    anchor, metric = torch.zeros(1, 1, 1, dim), torch.ones(1, 1, 1, dim)
    new, new_bias, place = native_merge.merge(entries, bias, None, 30, anchor, metric, 0.0)
    first, second = place[0, 0, :20], place[0, 0, 20:]
    assert torch.equal(first == second, torch.arange(20) < 10)
    for i in range(20):
        slot = new[0, 0, first[i]]
        if i < 10:
            torch.testing.assert_close(slot, (entries[0, 0, i] + entries[0, 0, 20 + i]) / 2)
            torch.testing.assert_close(new_bias[0, 0, first[i]], torch.tensor(2.0).log())
        else:
            assert torch.equal(slot, entries[0, 0, i])
            assert new_bias[0, 0, first[i]] == 0


@given(
    n=st.integers(2, 260),
    dim=st.integers(1, 40),
    value_dim=st.integers(1, 40),
    share=st.floats(0.01, 0.99),
    empty=st.floats(0, 0.9),
    alpha=st.sampled_from([0.0, 0.25, 1.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost(n, dim, value_dim, share, empty, alpha, seed):
    """The weight at the mean query, the weighted key and the weighted value are those of all slots before."""
    size = max(1, int(n * share))
    (entries, bias), (anchor, metric) = problem(n, dim, value_dim, seed=seed, empty=int(n * empty))
    new, new_bias, place = native_merge.merge(entries, bias, None, size, anchor, metric, alpha)
    live = bias > -torch.inf

    def sums(entries, bias):
        weight = (bias.double() + (entries[..., :dim] @ anchor.mT).squeeze(-1).double()).exp()
        return weight.sum(-1), (weight.unsqueeze(-1) * entries.double()).sum(-2)

    for after, before in zip(sums(new, new_bias), sums(entries, bias), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    assert int((new_bias > -torch.inf).sum(-1).min()) == min(size, int(live.sum(-1).min()))
    assert (place[live] < size).all()
    assert torch.isfinite(new).all()
    alone = torch.zeros(2, 3, size).scatter_add(2, place, live.float()).gather(2, place) == 1
    kept = new.gather(2, place.unsqueeze(-1).expand_as(entries))
    assert torch.equal(kept[alone & live], entries[alone & live])


def test_no_more_than_fit_stay_as_they_are(isa):
    (entries, bias), statistics = problem(20, 5, 4, empty=8)
    new, new_bias, place = native_merge.merge(entries, bias, None, 14, *statistics, 0.25)
    live = bias[0, 0] > -torch.inf
    assert torch.equal(new[:, :, :12], entries[:, :, live])
    assert torch.equal(new_bias[:, :, :12], bias[:, :, live])
    assert (new_bias[:, :, 12:] == -torch.inf).all()
    assert torch.equal(place[0, 0, live], torch.arange(12))


def test_what_is_not_finite_neither_hangs_nor_writes_outside(isa):
    for bad in (torch.nan, torch.inf):
        (entries, bias), statistics = problem(100, 8, 8)
        entries[:, :, 3] = bad
        bias[:, :, 50] = torch.nan
        _, _, place = native_merge.merge(entries, bias, None, 40, *statistics, 0.25)
        assert ((place >= 0) & (place < 40)).all()
