"""Calibration hands slots to the heads that need them, and its files are found again."""

import itertools
import json
import sys

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from hf_support import build, logits, tokens
from linattn import NearFar
from linattn.hf import Calibration, attach, budgets, calibrate, detach
from linattn.hf.budgets import hand_out
from linattn.hf.calibrate import repeating
from linattn.hf.unfinished import Unfinished

calibration = sys.modules["linattn.hf.calibrate"]  # linattn.hf.calibrate is the function
KERNEL = {"window": 16, "slots": 12, "sinks": 2, "block": 8}


def test_slots_go_where_they_remove_most_error():
    errors = torch.tensor([[[0.1, 0.1, 0.1], [9.0, 5.0, 0.0]], [[2.0, 0.5, 0.4], [0.3, 0.3, 0.2]]])
    assert hand_out(errors, [8, 16, 64], 24) == [[0, 2], [1, 0]]
    assert hand_out(errors, [8, 16, 64], 8) == [[0, 0], [0, 0]]
    assert hand_out(errors, [8, 16, 64], 64) == [[0, 2], [2, 2]]  # what gains nothing gets nothing


def test_a_step_that_only_pays_together_is_seen():
    errors = torch.tensor([[[4.0, 4.0, 0.0], [1.0, 0.9, 0.8]]])
    assert hand_out(errors, [8, 16, 64], 36) == [[2, 0]]


@settings(max_examples=60, deadline=None)
@example(seed=1, heads=1, prices=[196, 197], mean=0, units=16)
@given(
    seed=st.integers(0, 10**6),
    heads=st.integers(1, 4),
    prices=st.lists(st.integers(0, 500), min_size=1, max_size=4, unique=True).map(sorted),
    mean=st.integers(0, 500),
    units=st.sampled_from([16, 2**16]),
)
def test_no_other_assignment_is_better(seed, heads, prices, mean, units):
    errors = torch.rand(1, heads, len(prices), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "MOST_UNITS", units)
        (chosen,) = hand_out(errors, prices, mean)
    most = max(mean, prices[0]) * heads
    assert len(chosen) == heads
    assert sum(prices[i] for i in chosen) <= most

    def error(row):
        return float(sum(errors[0, h, i] for h, i in enumerate(row)))

    fitting = [
        row for row in itertools.product(range(len(prices)), repeat=heads) if sum(prices[i] for i in row) <= most
    ]
    if units > most:  # else prices are rounded up
        assert error(chosen) == pytest.approx(min(map(error, fitting)), abs=1e-6)


def test_the_text_is_made_to_repeat_itself():
    ids = torch.arange(1000).unsqueeze(0)
    again = repeating(ids)
    assert again.shape == ids.shape
    assert torch.equal(again[:, 600:900], ids[:, 100:400])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bert"])
def test_calibration_is_saved_and_found(family, tmp_path):
    model, ids = build(family), tokens(1, 300)
    before, folder = logits(model, ids), tmp_path / "budgets"  # made by calibrate
    found = calibrate(model, ids, 24, kernel=NearFar(**KERNEL), save=folder, progress=False)
    assert torch.equal(logits(model, ids), before)
    assert found.mean_slots <= 24
    assert (found.errors[..., -1] < 1e-6).all()  # as many slots as tokens is exact
    assert (found.errors[..., 0] > 1e-6).any()
    again = Calibration.load(folder)
    assert again.budgets == found.budgets
    assert torch.equal(again.errors, found.errors)
    model.config.name_or_path = model.name_or_path = str(folder)
    attach(model, "nearfar")
    attached = [m.linattn_kernel for m in model.modules() if hasattr(m, "linattn_kernel")]
    assert [k.slots for k in attached] == [tuple(m) for m in found.budgets.values()]
    assert attached[0].window == 16
    detach(model)


def test_a_damaged_file_says_so(tmp_path):
    (tmp_path / "linattn-budgets.json").write_text('{"budgets": ')
    with pytest.raises(ValueError, match="not a calibration"):
        Calibration.load(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("chosen", {"0": [99, 0], "1": [0, 0]}, "a layer without one option for each head"),
        ("chosen", {"0": [0, 0]}, r"errors of shape \(2, 2, 1\) for \(1, 2, 1\)"),
        ("options", [], r"for \(2, 2, 0\) layers, heads and options"),
        ("kernel", {"window": 16}, "a kernel without alpha"),
    ],
)
def test_a_file_whose_parts_do_not_fit_says_so(part, change, why, tmp_path):
    shape = {name: getattr(NearFar(), name) for name in budgets.MEASURED}
    rows = {0: [0, 0], 1: [0, 0]}
    Calibration(shape, [budgets.Option(8, 0, 8)], torch.zeros(2, 2, 1), torch.ones(2), rows).save(tmp_path)
    assert Calibration.load(tmp_path).chosen == rows
    file = tmp_path / "linattn-budgets.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: change}))
    with pytest.raises(ValueError, match=f"not a calibration of linattn: it has .*{why}"):
        Calibration.load(tmp_path)


def test_budgets_of_another_rule_are_refused(tmp_path):
    calibrate(build("llama"), tokens(1, 300), 24, kernel=NearFar(**KERNEL), save=tmp_path, progress=False)
    file = tmp_path / "linattn-budgets.json"
    content = json.loads(file.read_text())
    assert content.pop("rule")
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="another rule of near/far: calibrate anew"):
        Calibration.load(tmp_path)


def test_a_stopped_calibration_goes_on_where_it_was(tmp_path, monkeypatch):
    model, ids = build("llama"), tokens(1, 300)
    options = {"kernel": NearFar(**KERNEL), "save": tmp_path, "progress": False}
    whole = calibrate(model, ids, 24, **{**options, "save": None})
    real, measured = calibration._try, []

    def stopped(*args):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(1)
        return real(*args)

    monkeypatch.setattr(calibration, "_try", stopped)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, ids, 24, **options)
    monkeypatch.setattr(calibration, "_try", lambda *args: measured.append(2) or real(*args))
    found = calibrate(model, ids, 24, **options)
    assert measured == [1, 2]  # the first layer was not measured again
    assert torch.equal(found.errors, whole.errors)
    assert not (tmp_path / "linattn-unfinished.safetensors").exists()
    monkeypatch.setattr(calibration, "_try", stopped)
    measured.clear()
    with pytest.raises(KeyboardInterrupt):  # another text: nothing of the first one counts
        calibrate(model, ids, 24, **options)
    monkeypatch.setattr(calibration, "_try", lambda *args: measured.append(2) or real(*args))
    calibrate(model, tokens(1, 300, seed=1), 24, **options)
    assert measured == [1, 2, 2]


def test_rows_of_a_model_with_other_projections_do_not_count(tmp_path):
    """Adapters that were merged into it leave the embeddings as they are."""
    model, ids = build("llama"), tokens(1, 20)
    Unfinished(tmp_path, model, ids).add("0.0", torch.ones(2))
    assert Unfinished(tmp_path, model, ids).rows
    model.model.layers[1].self_attn.v_proj.weight.data += 0.01
    assert not Unfinished(tmp_path, model, ids).rows


def test_errors_are_means_over_passages(tmp_path):
    model, ids = build("llama"), torch.cat([tokens(1, 300), tokens(1, 300, seed=1)])
    options = {"kernel": NearFar(**KERNEL), "progress": False}
    one, other, both = (calibrate(model, x, 24, **options) for x in (ids[:1], ids[1:], ids))
    assert torch.equal(both.errors, (one.errors + other.errors) / 2)
    assert torch.equal(both.weights, (one.weights + other.weights) / 2)
    assert not torch.equal(one.errors, other.errors)


def test_calibrate_refuses_what_it_cannot_measure():
    model = build("llama")
    with pytest.raises(ValueError, match="256 tokens"):
        calibrate(model, tokens(1, 100))
    with pytest.raises(ValueError, match="detach"):
        calibrate(attach(model, "nearfar"), tokens(1, 300))
    with pytest.raises(ValueError, match="recall serves causal attention alone"):
        calibrate(build("t5"), tokens(1, 300), recall=4)
    with pytest.raises(ValueError, match="relative position bias"):
        calibrate(build("udop"), tokens(1, 300))


def test_a_model_in_training_is_measured_without_dropout_and_goes_on_training():
    model, ids = build("gpt2"), tokens(1, 300)
    options = {"kernel": NearFar(**KERNEL), "progress": False}
    found = calibrate(model, ids, 24, **options)
    model.train()
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout)).eval()
    again = calibrate(model, ids, 24, **options)
    assert torch.equal(again.errors, found.errors)
    assert torch.equal(again.weights, found.weights)
    assert [module for module in model.modules() if not module.training] == [frozen]


def test_calibration_in_inference_mode():
    model, ids = build("llama"), tokens(1, 300)
    options = {"kernel": NearFar(**KERNEL), "progress": False}
    found = calibrate(model, ids, 24, **options)
    with torch.inference_mode():
        again = calibrate(model, ids + 0, 24, **options)
    assert torch.equal(again.weights, found.weights)
    assert again.chosen == found.chosen


def test_models_that_cannot_share_slots_or_read_no_tokens_are_refused():
    with pytest.raises(ValueError, match=r"this model's have \[2, 4\]"):
        calibrate(build("bart", decoder_attention_heads=2), tokens(1, 300))
    sizes = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 60}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0, "max_source_positions": 20}
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **layers))
    with pytest.raises(ValueError, match="reads input_features: give all heads the same"):
        calibrate(whisper, tokens(1, 300))
    with pytest.raises(ValueError, match="reads input_features"):
        attach(whisper, "nearfar", mean_slots=24)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    found = calibrate(build("llama"), tokens(1, 300), 24, kernel=NearFar(**KERNEL), progress=False)
    found.picture(tmp_path / "budgets.png")
    assert (tmp_path / "budgets.png").stat().st_size > 1000
