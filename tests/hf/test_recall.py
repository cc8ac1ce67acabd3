"""Recall inside pretrained models: handed out by calibration, carried by the cache, measured by needles."""

from importlib import import_module

import pytest
import torch

pytest.importorskip("transformers")

from hf_support import KERNEL, WIDE, build, logits, tokens
from linattn import NearFar
from linattn.hf import Calibration, StateCache, attach, calibrate, detach
from linattn.hf.needle import FACTS, find_needles

calibrating = import_module("linattn.hf.calibrate")  # the package has the function under this name


def test_generation_with_the_state_is_generation_without():
    model, ids = build("llama"), tokens(2, 60)
    attach(model, NearFar(**KERNEL, recall=[2, 0], recall_bits=8))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    quick = model.generate(ids, past_key_values=StateCache(model), **options)
    assert torch.equal(quick, model.generate(ids, use_cache=False, **options))
    beams = model.generate(ids, past_key_values=StateCache(model), num_beams=2, **options)
    assert torch.equal(beams, model.generate(ids, use_cache=False, num_beams=2, **options))


def test_a_cache_with_recall_is_saved_forked_and_cropped(tmp_path):
    model, ids = build("llama"), tokens(1, 130)
    attach(model, NearFar(**KERNEL, recall=2))
    with torch.inference_mode():
        cache = StateCache(model)
        model(ids[:, :100], past_key_values=cache)
        cache.save(tmp_path)
        fork = cache.clone()
        expected = model(ids[:, 100:], past_key_values=cache).logits
        loaded = StateCache(model).load(tmp_path)
        torch.testing.assert_close(model(ids[:, 100:], past_key_values=loaded).logits, expected)
        model(ids[:, 100:102], past_key_values=fork)
        fork.crop(-2)
        torch.testing.assert_close(model(ids[:, 100:], past_key_values=fork).logits, expected, atol=1e-5, rtol=1e-5)


def test_calibration_hands_recall_to_heads_that_gain_most(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "RECALL_FROM", 0.0)
    model, ids = build("llama"), tokens(1, 300)
    kernel = NearFar(**KERNEL, recall_bits=16)
    kept = kernel.recall_price(64, 8, 8)
    found = calibrate(model, ids, 100, kernel=kernel, recall=100, recall_price=kept, save=tmp_path, progress=False)
    assert {(o.slots, o.price) for o in found.options if o.recall} == {(m, m + kept) for m in (0, 32, 128)}
    assert [o.price for o in found.options] == sorted(o.price for o in found.options)
    exact = [found.errors[..., i] for i, o in enumerate(found.options) if o.recall]
    assert all((error < 1e-5).all() for error in exact)  # a hundred blocks are all there are
    assert any(any(row) for row in found.recall.values())
    assert found.mean_slots <= 100
    plain = found.with_mean(100, recall=False)
    assert not any(any(row) for row in plain.recall.values())
    by_memory = calibrate(model, ids, 100, kernel=kernel, recall=100, progress=False)
    again = found.with_mean(100, recall_price=kernel.recall_price(300, 8, 8))
    assert again.options == by_memory.options
    assert again.chosen == by_memory.chosen
    model.config.name_or_path = model.name_or_path = str(tmp_path)
    attach(model, "nearfar")
    attached = [m.linattn_kernel for m in model.modules() if hasattr(m, "linattn_kernel")]
    assert [k.recalls(2) for k in attached] == [tuple(row) for row in found.recall.values()]
    assert [k.slots for k in attached] == [tuple(row) for row in found.budgets.values()]
    assert all(k.recall_bits == 16 and k.window == 16 for k in attached)
    detach(model)
    assert Calibration.load(tmp_path).options == found.options


def test_recall_is_not_tried_for_heads_that_lose_little(monkeypatch):
    monkeypatch.setattr(calibrating, "RECALL_FROM", 1.0)
    found = calibrate(build("llama"), tokens(1, 300), 100, kernel=NearFar(**KERNEL), recall=100, progress=False)
    plain = {o.slots: found.errors[..., i] for i, o in enumerate(found.options) if not o.recall}
    assert all(torch.equal(found.errors[..., i], plain[o.slots]) for i, o in enumerate(found.options) if o.recall)
    assert not any(any(row) for row in found.recall.values())


def test_recall_is_refused_where_attention_is_not_causal():
    with pytest.raises(ValueError, match="causal attention alone"):
        calibrate(build("bert"), tokens(1, 300), recall=4, progress=False)


def test_needles_are_placed_and_asked_for():
    model, filler = build("llama"), tokens(1, 400)
    told = []

    def encode(text):
        told.append(text)
        return [3 + ord(letter) % 50 for letter in text][:12]

    exact = find_needles(model, encode, filler, None, length=400)
    assert len(told) == 3 * len(FACTS)  # each is told, asked for and answered
    near_far = find_needles(model, encode, filler, (NearFar(**WIDE), None), length=400)
    assert near_far.log_likelihood == pytest.approx(exact.log_likelihood, abs=1e-4)
    assert near_far.rank == pytest.approx(exact.rank, abs=1e-3)
    assert exact.rank >= 1
    assert 0 <= exact.first <= 1
    other = find_needles(model, encode, filler, None, length=400, turn=1)
    assert other.log_likelihood != exact.log_likelihood
    assert torch.isfinite(logits(model, filler)).all()
