"""The baselines that drop keys: exact while nothing is dropped, bounded afterwards, and each keeps what its rule says."""

import pytest
import torch

pytest.importorskip("transformers")

from hf_support import build, logits, tokens
from linattn.hf import StateCache, attach, detach
from linattn.hf.baselines import NAMES, baselines_for, duo, pyramidkv, with_budgets
from linattn.hf.budgets import Calibration, Option
from linattn.hf.eviction import RULES, Eviction, rotary_frequencies
from linattn.hf.expected_attention import AHEAD, LEAST_WEIGHT, add_queries, no_sums, rotate, score


def qkv(length, seed=0, heads=4, kv_heads=2, dim=8):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, length, dim, generator=g) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("budgets", [40, (24, 41)])
def test_exact_while_nothing_is_dropped_and_any_split_alike(rule, budgets):
    model, ids = build("llama"), tokens(1, 60)
    exact = logits(model, ids)
    options = {"recent": 16, "block": 8, "frequencies": rotary_frequencies(model.config)}
    attach(model, dict.fromkeys(range(2), Eviction(rule, 200, **options)))
    torch.testing.assert_close(logits(model, ids), exact, atol=1e-5, rtol=1e-5)
    detach(model)
    attach(model, dict.fromkeys(range(2), Eviction(rule, budgets, **options)))
    whole = model(ids, past_key_values=StateCache(model)).logits
    assert not torch.allclose(whole, exact, atol=1e-4)
    cache, rows = StateCache(model), []
    for part in ids.split([1, 20, 9, 30], 1):
        rows.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-5)
    kept = 80 if budgets == 40 else sum(budgets)
    assert [state.entries.shape[1] for state in cache.states] == [kept + 2 * (60 % 8)] * 2


@pytest.mark.parametrize("rule", RULES)
def test_budgets_by_head_are_those_of_each_head_alone(rule):
    q, k, v = qkv(50)
    options = {"recent": 8, "sinks": 2, "block": 8, "frequencies": 1.0 / 10.0 ** torch.arange(4)}
    out, state = Eviction(rule, (13, 29), **options).attend(q, k, v, None, None)
    for h, budget in enumerate((13, 29)):
        one, alone = Eviction(rule, budget, **options).attend(
            q[:, 2 * h : 2 * h + 2], k[:, h : h + 1], v[:, h : h + 1], None, None
        )
        torch.testing.assert_close(out[:, 2 * h : 2 * h + 2], one)
        own = slice(0, 13 + 2) if h == 0 else slice(13 + 2, None)  # two tokens of the last block
        assert torch.equal(state.position[:, own], alone.position)
        assert torch.equal(state.entries[:, own], alone.entries)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "expected"])
def test_each_keeps_what_its_rule_says(rule):
    """By a loop over blocks of 8, heads and keys."""
    q, k, v = qkv(48)
    out, state = Eviction(rule, 18, recent=8, sinks=2, block=8).attend(q, k, v, None, None)
    x, kept = q.reshape(1, 2, 2, 48, 8)[0], [[], []]
    received = torch.zeros(2, 48)
    for start in range(0, 48, 8):
        weights = torch.zeros(2, 2, 8, 48)
        for h in range(2):
            kept[h] += range(start, start + 8)
            for g in range(2):
                for i in range(8):
                    seen = [j for j in kept[h] if j <= start + i]
                    weights[h, g, i, seen] = (k[0, h, seen] @ x[h, g, start + i] / 8**0.5).softmax(0)
                    torch.testing.assert_close(out[0, 2 * h + g, start + i], weights[h, g, i, seen] @ v[0, h, seen])
        block = weights.sum(2).mean(1)  # (heads, keys)
        received += block
        last = weights[:, :, -1].mean((0, 1))
        for h in range(2):
            keys, now = kept[h], start + 8
            if len(keys) <= 18:
                continue
            mean = torch.nn.functional.normalize(k[0, h, keys], dim=-1).mean(0)
            scores = {
                "streaming": torch.tensor(keys, dtype=torch.float32),
                "h2o": received[h, keys],
                "tova": last[keys],
                "snapkv": torch.stack([block[h, keys[max(0, n - 2) : n + 3]].sum() for n in range(len(keys))]),
                "knorm": -k[0, h, keys].norm(dim=-1),
                "keydiff": -torch.cosine_similarity(k[0, h, keys], mean.expand(len(keys), 8), dim=-1),
            }
            score = scores[rule].clone()
            for n, j in enumerate(keys):
                if (rule != "tova" and j < 2) or (rule not in ("tova", "streaming") and j >= now - 8):
                    score[n] = torch.inf
            kept[h] = sorted(keys[n] for n in score.topk(18).indices.tolist())
    assert state.position[0].tolist() == kept[0] + kept[1]
    stored = torch.cat([k, v], -1)[0]
    assert torch.equal(state.entries[0], torch.cat([stored[0, kept[0]], stored[1, kept[1]]]))


def test_pyramid_budgets_fall_and_keep_their_mean():
    budgets = [kernel.budget for kernel in pyramidkv(10, 200)]
    assert budgets == sorted(budgets, reverse=True)
    assert sum(budgets) / 10 == pytest.approx(200, abs=1)


def test_budgets_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="the rules are"):
        Eviction("lru", 100)
    with pytest.raises(ValueError, match="no room"):
        Eviction("h2o", (100, 4))
    with pytest.raises(ValueError, match="budgets of 3 kv heads do not fit 2"):
        Eviction("h2o", (100, 90, 80)).attend(*qkv(5), None, None)


def calibration():
    """Two layers of two heads; the second of layer 0 and the first of layer 1 lose most without slots."""
    options = [Option(slots, 0, slots) for slots in (0, 16, 64)]
    errors = torch.tensor([[[0.1, 0.0, 0.0], [0.9, 0.5, 0.0]], [[0.6, 0.3, 0.0], [0.2, 0.1, 0.0]]])
    shape = {"window": 16, "sinks": 2, "block": 8, "alpha": 1.0, "recall_bits": 8, "state_bits": 8}
    chosen = {0: [0, 2], 1: [2, 1]}  # slots 0, 64, 64, 16: 36 on average
    return Calibration(shape, options, errors, torch.tensor([1.0, 1.0]), chosen)


def test_duo_attention_keeps_everything_in_the_heads_that_need_it():
    kernels = duo(calibration(), 600, 1000)
    assert [kernel.budget for kernel in kernels] == [(200, 1000), (1000, 200)]
    (first, second) = duo(calibration(), 200, 1000)  # room for none
    assert first.budget == second.budget == (200, 200)
    assert all(sum(kernel.budget) <= 2 * 700 for kernel in duo(calibration(), 700, 1000))


def test_calibrated_budgets_differ_as_near_fars_and_have_its_mean():
    kernels = with_budgets("h2o", calibration(), 100)
    assert [kernel.budget for kernel in kernels] == [(64, 128), (128, 80)]
    assert sum(sum(kernel.budget) for kernel in kernels) == 4 * 100


def test_baselines_of_a_model():
    model, found = build("llama"), calibration()
    everything = baselines_for(model, [], found.near_far(), 36, found=found, length=500, calibrated=True)
    rules = [rule for rule in NAMES if rule not in ("pyramidkv", "duo")]
    assert set(everything) == {*NAMES, *(f"{rule}, calibrated" for rule in rules)}
    assert "duo" not in baselines_for(model, [], found.near_far(), 36)
    for wrong in ({"names": ["duo"]}, {"names": [], "calibrated": True}):
        with pytest.raises(ValueError, match="calibrate the model first"):
            baselines_for(model, kernel=found.near_far(), mean_slots=36, **wrong)
    attach(model, everything["h2o, calibrated"])
    assert logits(model, tokens(1, 30)).isfinite().all()


def test_expected_attention_is_that_of_gaussian_queries_to_come():
    """Against many queries drawn from the same Gaussian and turned by the mean rotation of the positions to come."""
    torch.manual_seed(0)
    D, n, count = 8, 12, 400_000
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)
    mix, mean = torch.randn(D, D, dtype=torch.float64) / 3, torch.randn(D, dtype=torch.float64)
    drawn = torch.randn(count, D, dtype=torch.float64) @ mix + mean
    k, v = torch.randn(1, 1, n, D, dtype=torch.float64), torch.randn(1, 1, n, D, dtype=torch.float64)
    positions = torch.arange(100, 100 + count) % 997
    seen = rotate(drawn, positions, frequencies)[None, None]
    sums = add_queries(no_sums(seen, 1), seen[:, :, None], positions, frequencies)
    found = score(sums, count, k, v, end=1000, scale=0.4, frequencies=frequencies)
    ahead = torch.eye(D, dtype=torch.float64).expand(AHEAD, D, D)
    turned = torch.stack([rotate(x, torch.tensor([1000 + t] * D), frequencies) for t, x in enumerate(ahead)]).mean(0)
    weight = (0.4 * (drawn @ turned) @ k[0, 0].T).exp().mean(0)
    expected = (weight / weight.sum() + LEAST_WEIGHT) * v[0, 0].norm(dim=-1)
    torch.testing.assert_close(found[0, 0], expected, rtol=0.02, atol=0)


def test_expected_attention_needs_rotary_positions():
    assert rotary_frequencies(build("gpt2").config) is None
    with pytest.raises(ValueError, match="plain rotary positions"):
        Eviction("expected", 100)
