"""The baselines that drop keys: exact while nothing is dropped, bounded afterwards, and each keeps what its rule says."""

import pytest
import torch

pytest.importorskip("transformers")

from hf_support import build, logits, tokens
from linattn.hf import StateCache, attach, detach
from linattn.hf.eviction import RULES, Eviction, baseline, rotary_frequencies
from linattn.hf.expected_attention import AHEAD, LEAST_WEIGHT, add_queries, no_sums, rotate, score


def qkv(length, seed=0, heads=4, kv_heads=2, dim=8):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, length, dim, generator=g) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("rule", RULES)
def test_exact_while_nothing_is_dropped_and_any_split_alike(rule):
    model, ids = build("llama"), tokens(1, 60)
    exact = logits(model, ids)
    options = {"recent": 16, "block": 8, "frequencies": rotary_frequencies(model.config)}
    attach(model, baseline(rule, 2, 200, **options))
    torch.testing.assert_close(logits(model, ids), exact, atol=1e-5, rtol=1e-5)
    detach(model)
    attach(model, baseline(rule, 2, 40, **options))
    whole = model(ids, past_key_values=StateCache(model)).logits
    assert not torch.allclose(whole, exact, atol=1e-4)
    cache, rows = StateCache(model), []
    for part in ids.split([1, 20, 9, 30], 1):
        rows.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-5)
    kept = [state.entries.shape[2] for state in cache.states]
    assert all(40 <= n < 48 for n in kept)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "expected"])
def test_each_keeps_what_its_rule_says(rule):
    """By a loop over the keys, after a second block of 8 queries."""
    q, k, v = qkv(32)
    kernel = Eviction(rule, 18, recent=8, sinks=2, block=8)
    first = Eviction(rule, 100, recent=8, sinks=2, block=8).attend(*(x[:, :, :24] for x in (q, k, v)), None, None)[1]
    _, state = kernel.attend(*(x[:, :, 24:] for x in (q, k, v)), first, None)
    logits = q.reshape(1, 2, 2, 32, 8) @ k.unsqueeze(2).mT / 8**0.5
    weights = logits.masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)[0]
    mean = torch.nn.functional.normalize(k, dim=-1).mean(2)[0]
    for h in range(2):
        last = weights[h, :, 24:].mean((0, 1))  # of the last block
        scores = {
            "streaming": torch.arange(32.0),
            "h2o": weights[h].sum((0, 1)),
            "tova": weights[:, :, -1].mean((0, 1)),
            "snapkv": torch.stack([last[max(0, j - 2) : j + 3].sum() for j in range(32)]),
            "knorm": -k[0, h].norm(dim=-1),
            "keydiff": -torch.cosine_similarity(k[0, h], mean[h].expand(32, 8), dim=-1),
        }
        score = scores["snapkv" if rule == "pyramidkv" else rule].clone()
        if rule != "tova":
            score[:2] = torch.inf
        if rule not in ("tova", "streaming"):
            score[24:] = torch.inf
        assert state.position[0, h].tolist() == sorted(score.topk(18).indices.tolist())
        kept = torch.cat([k, v], -1)[0, h, state.position[0, h]]
        assert torch.equal(state.entries[0, h], kept)


def test_pyramid_budgets_fall_and_keep_their_mean():
    budgets = [kernel.budget for kernel in baseline("pyramidkv", 10, 200).values()]
    assert budgets == sorted(budgets, reverse=True)
    assert sum(budgets) / 10 == pytest.approx(200, abs=1)
    with pytest.raises(ValueError, match="the baselines are"):
        Eviction("lru", 100)


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
