"""Models that cap or bias their scores, or have learned sinks: beyond what fits against a dense twin, and calibrated."""

import copy
import sys

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache

from hf_support import KERNEL, WIDE, build, tokens
from linattn import NearFar
from linattn.hf import StateCache, attach, calibrate, describe, detach
from linattn.hf.call import call_for
from nearfar_support import error
from nearfar_twin import twin

seam = sys.modules["linattn.hf.attention"]
calibration = sys.modules["linattn.hf.calibrate"]
# With causal near/far.
LAYERS = {"gemma2": 1, "gpt_oss": 1, "bloom": 2, "mpt": 2, "falcon_grouped": 2, "t5": 2, "umt5": 2}


def text(family, ids, **options):
    """Arguments of a call that reads these tokens by the decoder."""
    return {"input_ids": ids[:, :20], "decoder_input_ids": ids} if "t5" in family else {"input_ids": ids, **options}


@torch.inference_mode()
def read(model, **options):
    return model(**options).logits


def padded(length=70):
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return ids, mask


@pytest.mark.parametrize("family", LAYERS)
def test_layers_are_the_dense_twin_beyond_what_fits(family, monkeypatch):
    """What each layer makes of what it is given, and that caches give the same in chunks."""
    model, (ids, mask) = build(family), padded()
    tolerance = 1e-5 if family == "gpt_oss" else 1e-9
    model = model if family == "gpt_oss" else model.double()  # its experts have no float64
    attach(model, NearFar(**KERNEL))
    calls = []

    def attention(q, k, v, **given):
        out = real(q, k, v, **given)
        if given["is_causal"] and not given.get("return_state"):
            calls.append(((q, k, v), given, out))
        return out

    real = seam.attention
    monkeypatch.setattr(seam, "attention", attention)
    whole = read(model, **text(family, ids, attention_mask=mask), use_cache=False)
    assert len(calls) == LAYERS[family]
    for qkv, given, out in calls:
        expected = twin(*qkv, given["kernel"], scale=given["scale"], mask=given["key_mask"])
        assert error(out, expected) < tolerance
    cache, outs, i = StateCache(model), [], 0
    cache = EncoderDecoderCache(cache, DynamicCache()) if "t5" in family else cache
    for n in (40, 1, 1, 20, 8):
        cut = {"attention_mask": mask[:, : i + n], "input_ids": ids[:, i : i + n]}
        if "t5" in family:
            cut = {"input_ids": ids[:, :20], "decoder_input_ids": ids[:, i : i + n]}
        outs.append(read(model, **cut, past_key_values=cache, use_cache=True))
        i += n
    shown = slice(0 if "t5" in family else 7, None)
    torch.testing.assert_close(torch.cat(outs, 1)[:, shown], whole[:, shown], atol=1e-2 * tolerance**0.5, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "bloom", "mpt", "falcon", "falcon_grouped", "t5", "umt5"])
def test_a_layer_without_a_kernel_keeps_its_own_softmax(family):
    """Also beside a layer whose cache holds a state, and so hands on no keys of the past."""
    model, (ids, mask) = build(family), padded(50)
    own = read(model, **text(family, ids, attention_mask=mask))
    attach(model, {1: NearFar(**WIDE)} if family == "gemma2" else {0: NearFar(**WIDE)})
    shown = slice(0 if "t5" in family else 7, None)
    torch.testing.assert_close(
        read(model, **text(family, ids, attention_mask=mask))[:, shown], own[:, shown], atol=2e-4, rtol=1e-3
    )
    cache = StateCache(model)
    cache = EncoderDecoderCache(cache, DynamicCache()) if "t5" in family else cache
    outs = []
    for i, j in ((0, 30), (30, 31), (31, 50)):
        cut = {"attention_mask": mask[:, :j], "input_ids": ids[:, i:j]}
        if "t5" in family:
            cut = {"input_ids": ids[:, :20], "decoder_input_ids": ids[:, i:j]}
        outs.append(read(model, **cut, past_key_values=cache, use_cache=True))
    torch.testing.assert_close(torch.cat(outs, 1)[:, shown], own[:, shown], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "bloom", "mpt", "falcon", "falcon_alibi", "t5"])
def test_training_reaches_every_weight_as_softmax_does(family):
    """While keys fit: also the learned buckets of T5."""
    model, ids = build(family).double(), tokens(2, 40)
    grads = []
    for attached in (False, True):
        if attached:
            attach(model, NearFar(**WIDE))
        model.zero_grad()
        model(**text(family, ids), labels=ids).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        # transformers' softmax is in float32
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5 * float(grad.abs().max()), rtol=0, msg=name)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for p in again.parameters():
            p.mul_(1.1)
    detached = detach(copy.deepcopy(again))
    outs = [read(x, **text(family, ids)) for x in (again, detached)]
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gpt_oss", "bloom", "mpt", "falcon", "falcon_grouped", "t5", "mt5", "umt5", "switch", "longt5", "bart"],
)
def test_calibration_measures_what_the_layers_do(family):
    model, ids = build(family), tokens(1, 300)
    call = call_for(model, ids)
    own = read(model, **call)

    def show(*_):
        pass

    with calibration.show_attention(model, show, biased=True):
        # transformers rounds the positions of Falcon's ALiBi to bfloat16, from 256 tokens on
        torch.testing.assert_close(read(model, **call)[:, :250], own[:, :250], atol=1e-4, rtol=1e-3)
    seen = {}

    def visit(layer, measure):
        seen[layer] = [measure(NearFar(**{**KERNEL, "slots": slots}), None) for slots in (300, 100, 12)]
        return seen[layer][0]

    calibration.measure_layers(model, ids, visit)
    for whole, some, few in seen.values():
        assert (whole < 1e-9).all()
        assert (few > 1e-6).any()
        assert some.sum() < few.sum()
    found = calibrate(model, ids, 24, kernel=NearFar(**KERNEL), progress=False)
    assert list(found.budgets) == list(seen)
    assert torch.equal(read(model, **call), own)
    attach(model, found.kernels())
    assert read(model, **call).isfinite().all()


def test_each_module_of_an_encoder_decoder_gets_its_own_budgets(tmp_path):
    """Layers of encoder, decoder and cross-attention have the same indices."""
    model, ids = build("t5"), tokens(1, 300)
    with torch.no_grad():  # attends evenly: any number of slots will do
        model.get_submodule("encoder.block.0.layer.0.SelfAttention.q").weight.zero_()
    found = calibrate(model, ids, 24, kernel=NearFar(**KERNEL), save=tmp_path, progress=False)
    assert len(found.budgets) == 6
    assert len({tuple(row) for row in found.errors[..., 0].tolist()}) == 6
    model.config.name_or_path = model.name_or_path = str(tmp_path)
    attach(model, "nearfar")
    for name, slots in found.budgets.items():
        assert model.get_submodule(name).linattn_kernel.slots == tuple(slots)
    cache = EncoderDecoderCache(StateCache(model), StateCache(model))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert out.shape[1] > 1
    detach(model)
    budgets = {"decoder.block.1.layer.0.SelfAttention": [1, 2, 3, 4], 0: 5}
    attach(model, NearFar(**KERNEL), budgets=budgets)
    kernels = {name: m.linattn_kernel.slots for name, m in model.named_modules() if hasattr(m, "linattn_kernel")}
    assert [name for name in kernels if kernels[name] == (1, 2, 3, 4)] == ["decoder.block.1.layer.0.SelfAttention"]
    assert sum(slots == 5 for slots in kernels.values()) == 3
    with pytest.raises(ValueError, match=r"no attention module 'decoder\.9': its first one is 'encoder\.block\.0"):
        attach(detach(model), {"decoder.9": "nearfar"})


def test_what_was_done_is_described():
    words = {
        "gemma2": "NearFar, logit cap",
        "bloom": "NearFar, ALiBi",
        "t5": "NearFar, position bias",
        "gpt_oss": "NearFar, learned sink",
    }
    for family, does in words.items():
        model = attach(build(family), NearFar(**KERNEL))
        assert does in {row.does for row in describe(model).layers}
    umt5 = describe(attach(build("umt5"), NearFar(**KERNEL))).layers  # its buckets reach farther than the window
    assert umt5[0].engine == "torch"
