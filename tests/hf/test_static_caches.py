"""Static caches of transformers under an attached model: what is not written yet, and masks as wide as the cache."""

import pytest
import torch
from transformers import StaticCache

from hf_support import WIDE, build, tokens
from linattn import NearFar
from linattn.hf import attach, detach


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
