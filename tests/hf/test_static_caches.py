"""Static caches under an attached model: what is not written yet, and masks as wide as the cache; parts and configurations
that models share."""

import pytest
import torch
from transformers import StaticCache

from hf_support import WIDE, build, logits, tokens
from linattn import NearFar
from linattn.hf import attach, calibrate, detach


@torch.inference_mode()
def in_calls(model, ids, mask):
    """Logits of visible tokens that are read in three calls with a static cache and a mask of its width."""
    cache = StaticCache(config=model.config, max_cache_len=mask.shape[1])
    parts = [
        model(part, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        for part in ids.split([20, 1, 9], 1)
    ]
    return torch.cat(parts, 1)[mask[:, :30].bool()]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layers", [(0, 1), (1,)])
def test_a_mask_as_wide_as_the_cache_hides_the_same_tokens(family, layers):
    model, ids, mask = build(family), tokens(2, 30), torch.ones(2, 64, dtype=torch.long)
    mask[0, :7] = 0
    own = in_calls(model, ids, mask)
    attach(model, dict.fromkeys(layers, NearFar(**WIDE)))
    torch.testing.assert_close(in_calls(model, ids, mask), own, atol=1e-4, rtol=1e-4)


def test_bloom_which_widens_its_masks_itself():
    model, ids = build("bloom"), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():  # so that what it writes depends on attention
        for block in model.transformer.h:
            block.self_attention.dense.weight.mul_(10)
    options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    own = model.generate(ids, **options)
    for layers in ((0, 1), (1,)):
        attach(model, dict.fromkeys(layers, NearFar(**WIDE)))
        assert torch.equal(model.generate(ids, cache_implementation="static", **options), own)
        detach(model)


def test_a_full_mask_of_one_query_is_cut_to_what_is_written():
    """As transformers hands it to a decoder that is attached without the model around it."""
    model, ids = build("t5"), tokens(2, 30)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("Attention.v.weight", "Attention.o.weight")):
                p.mul_(10)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    own = model.generate(ids, **options)
    attach(model.get_decoder(), NearFar(**WIDE))
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), own)


def test_a_model_that_shares_the_configuration_of_an_attached_one():
    """It keeps its attention, but is not asked for its cache: which keys are written would be guessed."""
    ours, ids = build("llama"), tokens(2, 30)
    theirs = type(ours)(ours.config).eval()
    own = logits(theirs, ids)
    attach(ours, NearFar(**WIDE))
    torch.testing.assert_close(logits(theirs, ids), own, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="linattn is not attached to"):
        in_calls(theirs, ids, torch.ones(2, 64, dtype=torch.long))
    with pytest.raises(ValueError, match="shares its configuration"):
        attach(theirs, NearFar(**WIDE))
    detach(ours)
    assert torch.equal(logits(theirs, ids), own)


@pytest.mark.parametrize("outer", [True, False])
def test_a_model_and_a_part_of_it_are_not_both_attached(outer):
    """Detaching one would break the other."""
    model, ids = build("llama"), tokens(2, 30)
    own = logits(model, ids)
    first, second = (model, model.model) if outer else (model.model, model)
    attach(first, NearFar(**WIDE))
    with pytest.raises(ValueError, match="a part of it, has linattn attached already"):
        attach(second, NearFar(**WIDE))
    with pytest.raises(ValueError, match="detach"):
        calibrate(second, tokens(1, 300))
    detach(first)
    assert torch.equal(logits(model, ids), own)
