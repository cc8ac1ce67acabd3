"""Budgets without a text: measured once on the model's own, kept, and within the memory that was given."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import RobertaConfig, RobertaModel

from hf_support import KERNEL, build, cache, logits, tokens
from linattn import NearFar
from linattn.hf import Calibration, StateCache, attach, calibrate, detach, self_calibration
from linattn.hf.self_calibration import find_or_calibrate, own_text, parse_bytes, random_tokens, recall_pays

__all__ = ["cache"]


def kernels(model):
    return [m.linattn_kernel for m in model.modules() if hasattr(m, "linattn_kernel")]


def test_measured_once_and_kept(cache, capsys):
    model, ids = build("llama"), tokens(1, 100)
    before = logits(model, ids)
    attach(model, NearFar(**KERNEL), mean_slots=24)
    assert capsys.readouterr().err.count("measured which heads") == 1
    assert len(list(cache.glob("budgets/*/linattn-budgets.json"))) == 1
    first = [kernel.slots for kernel in kernels(model)]
    assert 0 < sum(map(sum, first)) <= 24 * sum(map(len, first))
    detach(model)
    attach(model, NearFar(**KERNEL), mean_slots=24)
    assert "measured" not in capsys.readouterr().err
    assert [kernel.slots for kernel in kernels(model)] == first
    detach(model)
    assert torch.equal(logits(model, ids), before)
    torch.manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    attach(model, NearFar(**KERNEL), mean_slots=24)  # other weights are another model
    assert "measured" in capsys.readouterr().err


def test_other_projections_are_another_model(cache):
    """Of 16 layers of Llama, as of Llama 3.2 1B: a sample of whole weights at equal distances met nothing but norms."""
    model = build("llama", num_hidden_layers=16, tie_word_embeddings=True)
    own = self_calibration._fingerprint(model, NearFar(**KERNEL), 0, 300)
    assert self_calibration._fingerprint(model, NearFar(**KERNEL), 0, 300) == own
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data += 0.01
    assert self_calibration._fingerprint(model, NearFar(**KERNEL), 0, 300) != own


@pytest.mark.parametrize("family", ["mpt", "roberta"])
def test_no_more_tokens_are_measured_than_a_model_has_positions_for(family, cache):
    """MPT has a name of its own for them, and RoBERTa's first two are never used."""
    if family == "mpt":
        model = build("mpt", max_seq_len=300)
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
        model = RobertaModel(RobertaConfig(**sizes, vocab_size=300, max_position_embeddings=302, pad_token_id=1)).eval()
    found = find_or_calibrate(model, NearFar(**KERNEL), mean_slots=24)
    assert max(option.slots for option in found.options) == 300


def test_a_model_in_training_writes_what_it_writes_otherwise():
    model = build("gpt2")
    ids = own_text(model, 100)
    assert torch.equal(own_text(model.train(), 100), ids)
    assert model.training


def test_an_encoder_decoder_is_measured_on_random_tokens(cache, capsys):
    found = find_or_calibrate(build("t5"), NearFar(**KERNEL), mean_slots=24, length=300)
    assert "on random tokens" in capsys.readouterr().err
    assert len(found.budgets) == 6
    assert 0 < found.mean_slots <= 24


def test_a_calibration_beside_the_model_takes_precedence(tmp_path, capsys):
    model = build("llama")
    saved = calibrate(model, tokens(1, 300), 24, kernel=NearFar(**KERNEL), save=tmp_path / "model", progress=False)
    model.config.name_or_path = model.name_or_path = str(tmp_path / "model")
    attach(model, NearFar(**KERNEL), mean_slots=40)
    assert [list(k.slots) for k in kernels(model)] == list(saved.with_mean(40, recall=False).budgets.values())
    assert "measured" not in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_memory_is_kept_to(family):
    model = build(family)
    own = attach(model, NearFar(**{**KERNEL, "slots": 0}))
    cache = StateCache(own)
    own(tokens(1, 100), past_key_values=cache)
    least = sum(state.nbytes for state in cache.states if state is not None)
    detach(model)
    with pytest.raises(ValueError, match="window of 16 tokens alone"):
        attach(model, NearFar(**KERNEL), memory=least // 2)
    allowed = least + 20000
    attach(model, NearFar(**KERNEL, recall_bits=8), memory=allowed)
    cache = StateCache(model)
    model(tokens(1, 400), past_key_values=cache)
    used = sum(state.nbytes for state in cache.states if state is not None)
    assert least < used <= allowed


def test_recall_that_no_head_got_is_said():
    said = []
    options = {"kernel": NearFar(**KERNEL), "progress": False, "say": said.append}
    found = calibrate(build("llama"), tokens(1, 300), 2, recall=2, **options)
    assert not any(any(row) for row in found.recall.values())
    assert len(said) == 1
    assert "no head got recall" in said[0]
    options["kernel"] = NearFar(**KERNEL, recall_bits=8, state_bits=8)
    calibrate(build("llama"), tokens(1, 300), 200, recall=2, **options)
    assert "300 slots hold every token" in said[1]


def test_recall_is_measured_where_it_may_take_less_memory_than_slots_for_all_tokens():
    model = build("llama")
    assert recall_pays(model, NearFar(**KERNEL, recall_bits=8), 300)
    assert not recall_pays(model, NearFar(**KERNEL, recall_bits=8, state_bits=8), 300)
    for bits in (32, 8):
        found = find_or_calibrate(model, NearFar(**KERNEL, recall_bits=8, state_bits=bits), memory="1MB", length=300)
        assert any(option.recall for option in found.options) == (bits == 32)


def test_sizes_are_read_and_nonsense_is_refused():
    assert parse_bytes("64MiB") == 64 * 2**20
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes(1000) == parse_bytes("1000") == 1000
    for bad in ("much", "64 parsecs", "-1", ""):
        with pytest.raises(ValueError, match="64MiB"):
            parse_bytes(bad)
    model = build("llama")
    with pytest.raises(ValueError, match="either"):
        attach(model, mean_slots=24, memory="1MiB")
    with pytest.raises(ValueError, match="one NearFar kernel"):
        attach(model, "elu", mean_slots=24)
    for write in (random_tokens, own_text):
        ids = write(model, 50)
        assert ids.shape == (1, 50)
        assert ids[0, 0] == 1
        assert torch.equal(write(model, 50), ids)
    assert Calibration.find(model) is None
