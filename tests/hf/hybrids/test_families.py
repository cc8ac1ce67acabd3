"""attach on tiny models of every family with linear layers: equal to transformers alone in every way a model is used."""

import pytest
import torch
import transformers

from hf_support import logits, tokens
from hybrid_support import FAMILIES, build_hybrid, own
from linattn.hf import attach, describe, detach

transformers.logging.set_verbosity_error()  # that the reference code is slow
NO_CHUNKS = {"minimax"}  # transformers' own cache does not go on with several tokens


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """The family's name, the model as it is, and attached."""
    model = attach(build_hybrid(request.param))
    assert all(row.engine == "native" for row in describe(model).layers if "softmax" not in row.does)
    return request.param, own(request.param), model


def near(found, expected, bound=1e-4):
    assert float((found - expected).norm() / expected.norm()) < bound


def padded(batch=2, length=37, hidden=9):
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    mask[0, :hidden], ids[0, :hidden] = 0, 0
    return ids, mask


@torch.inference_mode()
def in_calls(model, ids, lengths=(20, 1, 15, 1)):
    """Logits of a prompt that is read in several calls with the model's own cache."""
    outs, i, cache = [], 0, {}
    for n in lengths:
        out = model(ids[:, i : i + n], use_cache=True, **cache)
        name = "cache_params" if "cache_params" in out else "past_key_values"
        cache, i = {name: out[name]}, i + n
        outs.append(out.logits)
    return torch.cat(outs, 1)


def test_logits_with_and_without_padding(pair):
    _, theirs, ours = pair
    ids, mask = padded()
    near(logits(ours, ids), logits(theirs, ids))
    near(logits(ours, ids, attention_mask=mask)[:, 9:], logits(theirs, ids, attention_mask=mask)[:, 9:])


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}, {"num_beams": 2}])
def test_generate_token_for_token(pair, options):
    _, theirs, ours = pair
    ids, mask = padded()
    options = {"do_sample": False, **options, "attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5}
    written = []
    for model in (theirs, ours):
        torch.manual_seed(1)
        written.append(model.generate(ids, **options))
    assert torch.equal(*written)


def test_a_prompt_in_several_calls_is_a_prompt_in_one(pair):
    """Also for Mamba-1, where transformers itself forgets the state between calls of several tokens."""
    family, theirs, ours = pair
    if family in NO_CHUNKS:
        pytest.skip("transformers' cache of this family takes the rest of a prompt one token at a time")
    ids = tokens(2, 37)
    # In Bamba, transformers counts the positions of a softmax layer anew in each call.
    near(in_calls(ours, ids), in_calls(theirs, ids) if family == "bamba" else logits(theirs, ids))


def test_gradients(pair):
    _, theirs, ours = pair
    ids, found = tokens(2, 37), []
    for model in (theirs, ours):
        model.train()
        loss = model(ids, labels=ids, use_cache=False).loss
        wanted = [p for p in model.parameters() if p.requires_grad]
        found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
        model.eval()
    largest = max(float(g.abs().max()) for g in found[0] if g is not None)
    for theirs_grad, ours_grad in zip(*found, strict=True):
        assert (theirs_grad is None) == (ours_grad is None)
        if theirs_grad is not None:
            scale = max(float(theirs_grad.abs().max()), 1e-4 * largest)
            assert float((ours_grad - theirs_grad).abs().max()) < 1e-2 * scale


def test_detach_restores_exactly(pair):
    family, theirs, _ = pair
    ids, model = tokens(2, 20), build_hybrid(family)
    before = [dict(module.__dict__) for module in model.modules()]
    detach(attach(model))
    assert [module.__dict__.keys() for module in model.modules()] == [x.keys() for x in before]
    assert torch.equal(logits(model, ids), logits(theirs, ids))
    assert list(model.state_dict()) == list(theirs.state_dict())
